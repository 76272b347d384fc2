"""What `subject erase` says: each store by itself, and never that something is done which nobody could check."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from odradek.streams.replay.sightings import Reached, Sighting

State = Literal["unreadable", "deleted", "none", "readable", "unreachable"]
"""`unreadable`: ciphertext whose key is destroyed. `deleted`: it was there and is gone, read back. `none`: nothing of
theirs is or was there. `readable`: plain content is left. `unreachable`: nobody could look."""

DONE: frozenset[State] = frozenset(("unreadable", "deleted", "none"))


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """One store, read back after everything was done."""

    store: str
    state: State
    detail: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing readable of the subject is left there."""
        return self.state in DONE


class LocalStore(Protocol):
    """A place outside log and object store that may hold a subject's content."""

    async def erase(self, subject: str, sessions: frozenset[str]) -> StoreReport:
        """Remove what is theirs and read back. Harmless when repeated; never raises for what it cannot reach."""


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """That nothing of theirs is trained on from the request on, as far as the log shows now. What is still to come is
    held by rule: assembler and trainer read subjects.v1 to its end before each batch and step."""

    since: int
    """Offset of erasure.requested on subjects.v1."""
    batches: int
    """Batches assembled by somebody who had read the request."""
    steps: int
    """Steps taken by somebody who had read the request, on batches that hold sessions of theirs."""
    pending: list[str] = []
    """Batches that hold sessions of theirs and are not trained yet: those will have zero weight."""
    broken: list[str] = []
    """Batches and steps that took theirs though they had read the request. Must be empty."""


class ErasureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole."""

    subject: str
    request_id: str
    requested_at: str
    """Coordinates of erasure.requested."""
    first: bool
    """Whether this run destroyed the key; an earlier one did otherwise."""
    sessions: int
    stores: list[StoreReport]
    exclusion: Exclusion
    batches: list[Sighting]
    versions: list[Reached]
    """Weight versions that their tokens reached. We never claim that weights forgot."""

    @property
    def done(self) -> bool:
        """Whether every store is, and nothing was taken after the request."""
        return all(store.done for store in self.stores) and not self.exclusion.broken
