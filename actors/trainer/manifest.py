"""The manifest of a version: the one small object that makes a checkpoint exist.

It is put with If-None-Match at `INCARNATION/POLICY/LANE/N` after all its shards, so a version has one winner and a
killed save leaves none. Shards are named by their content. A manifest holds no clock and no host, so two trainers that
computed the same step write the same bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from odradek.actors.trainer.delta import DeltaInfo
from odradek.actors.trainer.errors import AdoptionError, IncompleteCheckpointError

WEIGHTS, WEIGHTS_DELTA, TRAINER = "weights", "weights.delta", "trainer"
"""Names of shards: all weights as safetensors under Hugging Face names; a delta on the parent; Adam and generator."""


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One content-addressed object."""

    name: str
    key: str
    sha256: str
    bytes: int


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a version was made from. An existing manifest is adopted only if all of this is as expected."""

    parent: int | None
    """None for the warm start and for imported weights."""
    batch_id: str = ""
    input_offset: int = -1
    """Offset of the batch on batches.v1: the trainer goes on after it. -1 is before the first."""
    configuration: dict[str, Any] = {}
    """The settings in force, as JSON values."""
    batch_root: str = ""
    """The batch's Merkle root: another history may have made another batch of the same id at the same offset."""
    copied_from: str = ""
    """Manifest that these weights are a copy of: the version that a branch or a new incarnation starts from."""


class ConsentRead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the step knew of consent. It belongs to the weights: whoever adopts them reports this, not what it would
    find itself."""

    subjects_offset: int = 0
    """subjects.v1 had been read up to here (exclusive)."""
    left_out: list[str] = []
    """Sessions whose tokens got zero weight."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version, complete."""

    incarnation: str
    policy: str
    lane: str
    version: int
    origin: Origin
    model: dict[str, Any]
    """`config.json` of the policy."""
    weights_digest: str
    """`state_digest` of the weights, whichever way they are stored."""
    numerics_id: str
    optimiser_updates: int
    """Schedule: optimiser steps so far; training steps are `version`."""
    shards: list[Shard]
    delta: DeltaInfo | None = None
    """Set when the weights are stored as a delta on `delta.base_version`."""
    consent: ConsentRead = ConsentRead()

    @property
    def name(self) -> str:
        """How messages name this checkpoint."""
        return Place(self.incarnation, self.policy, self.lane).key(self.version)

    def shard(self, name: str) -> Shard:
        for shard in self.shards:
            if shard.name == name:
                return shard
        raise IncompleteCheckpointError(f"{self.name} lists no shard {name!r}; it has {[s.name for s in self.shards]}")

    def encode(self) -> bytes:
        return msgspec.json.encode(self, order="deterministic")


class Place(msgspec.Struct, frozen=True):
    """Where the versions of one lane live. Each part is a plain name: it becomes part of object keys."""

    incarnation: str
    policy: str
    lane: str

    def __post_init__(self) -> None:
        for part in (self.incarnation, self.policy, self.lane):
            if not part or "/" in part:
                raise ValueError(f"incarnation, policy and lane must be non-empty names without '/', found {part!r}")

    @property
    def prefix(self) -> str:
        return f"{self.incarnation}/{self.policy}/{self.lane}/"

    def key(self, version: int) -> str:
        return f"{self.prefix}{version}"

    def pruned_key(self, version: int) -> str:
        """Where a mark lies once the version's shards are no longer kept."""
        return f"{self.pruned_prefix}{version}"

    @property
    def pruned_prefix(self) -> str:
        return f"{self.prefix}pruned/"

    @classmethod
    def of_key(cls, key: str) -> tuple[Place, int]:
        """The place and version of a manifest's key."""
        parts = key.split("/")
        if len(parts) != 4 or not parts[3].isdigit():
            raise ValueError(f"{key!r} is no manifest key; expected INCARNATION/POLICY/LANE/VERSION")
        return cls(*parts[:3]), int(parts[3])

    def version_of(self, key: str) -> int | None:
        """The version whose manifest stands at `key`; None for other keys."""
        tail = key.removeprefix(self.prefix)
        return int(tail) if key.startswith(self.prefix) and tail.isdigit() else None


def decode(data: bytes, key: str) -> Manifest:
    """Read a manifest found at `key`; raises `IncompleteCheckpointError` when it is no whole manifest."""
    try:
        return msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as e:
        raise IncompleteCheckpointError(f"manifest {key} ({len(data)} bytes) is damaged: {e}") from e


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_adoptable(found: Manifest, version: int, expected: Origin) -> None:
    """Refuse a manifest that is not the one of the next uncommitted batch; raises `AdoptionError` naming each field."""
    differences = [] if found.version == version else [f"version is {found.version}, expected {version}"]
    for field in Origin.__struct_fields__:
        is_, want = getattr(found.origin, field), getattr(expected, field)
        if is_ != want:
            differences.append(f"{field} is {is_!r}, expected {want!r}")
    if differences:
        raise AdoptionError(
            f"manifest {found.name} exists but is not of the next uncommitted batch: {'; '.join(differences)}. "
            "Nothing was adopted or overwritten; find out who wrote it, or begin a new incarnation: `odradek restore`"
        )
