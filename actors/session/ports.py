"""What a session needs of the world: three small protocols, implemented by Ray clients and by tests.

Every method has a deadline of its implementation's and raises a type of `errors.py` when it passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from odradek.streams.events.meta import BlobRef, Meta, RecordRef
from odradek.streams.events.sessions import SessionEvent, WeightSpan, WorkspaceDelta
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.ownership import SessionRecord


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An event to append for one session, in order."""

    event_id: str
    meta: Meta
    body: SessionEvent


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled turn. `tokens` int32 ids, stop token included; `logprobs` one each."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[WeightSpan]
    numerics_id: str
    finish_reason: str
    experts: bytes = b""
    """Routed experts of every computed token of the context, int16 [tokens, layers, top_k]; empty for a dense model."""
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    call_id: str
    name: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The result of one call: what the model is shown and what it changed."""

    text: str
    is_error: bool
    delta: WorkspaceDelta | None = None
    duration_ms: float = 0.0
    redactions: int = 0
    uncertain: bool = False
    """It may or may not have had its external effect."""


@dataclass(frozen=True, slots=True)
class EnvironmentInfo:
    sandbox_id: str
    driver: str
    image_digest: str


@dataclass(frozen=True, slots=True)
class WorkspaceStart:
    """All that a workspace is before the first call."""

    image: str
    files: dict[str, bytes]
    setup: list[str] = field(default_factory=list)
    files_ref: BlobRef | None = None
    """A tar of the files in the object store, in place of `files`."""
    subject: str = ""
    """Whose files these are: large contents of later changes are stored under this subject."""
    production: bool = False
    """A person waits: never queued behind rollouts."""


def start_of(task: TaskPublished) -> WorkspaceStart:
    """What a published task's workspace is before the first call: the same for the agent and for its grader."""
    files = {path: text.encode() for path, text in task.files.items()}
    return WorkspaceStart(task.image, files, list(task.setup), task.files_ref)


class SessionLog(Protocol):
    async def append(self, session_id: str, events: Sequence[Outgoing]) -> list[RecordRef]:
        """Append in order to the session's partition; returns when all are acknowledged."""
        ...

    async def read(self, session_id: str, start: int, end: int | None = None) -> list[SessionRecord]:
        """The session's records of [start, end), in log order; up to now without an end."""
        ...

    async def session_at(self, opened: RecordRef) -> list[SessionRecord]:
        """All records so far of the session that was opened by the record there."""
        ...


class EnginePort(Protocol):
    async def sample(
        self,
        *,
        session_id: str,
        epoch: int,
        turn: int,
        tokens: list[int],
        position_base: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        temperature: float,
        seed: int,
        priority: int,
        pinned_version: int | None,
        timeout_s: float,
    ) -> Completion:
        """Sample one turn after `tokens` (the whole context, whose first token has position `position_base` in the
        session). Raises EngineUnavailable."""
        ...


class EnvironmentPort(Protocol):
    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        """A sandbox holding start + deltas; kills what an older epoch still runs. Raises EnvironmentLost."""
        ...

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        """One outcome a call, in order. Several calls are pure and run together. A command that runs longer than
        `tool_seconds` is ended and says so in its outcome. Raises EnvironmentLost."""
        ...

    async def close(self, session_id: str, epoch: int) -> None: ...
