"""weights.v1 (what happened), weights.current.v1 (what to serve) and replicas.v1 (what is served)."""

from __future__ import annotations

import msgspec


class VersionPublished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="version.published.v1"):
    policy: str
    version: int
    manifest_key: str
    manifest_sha256: str
    lane: str = ""
    step: int = 0
    batch_id: str = ""
    parent: int | None = None
    numerics_id: str = ""
    parent_key: str = ""
    """Manifest that these weights come from where that is not version `parent` in the same place: another policy's (a
    branch), or this very version's in the incarnation before (a restore)."""
    restored: bool = False
    """A new incarnation begins here: versions above this one that were published before are given up."""


class VersionPinned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="version.pinned.v1"):
    policy: str
    version: int | None
    """None releases the pin."""
    reason: str = ""


class CanaryShared(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="version.canary.v1"):
    policy: str
    version: int
    share: float


class VersionRolledBack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="version.rolled_back.v1"):
    policy: str
    to_version: int
    reason: str = ""


class VersionPruned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="version.pruned.v1"):
    """Versions whose weights are no longer kept (`streams.pruning` says which of them really go). They stay part of
    the history; nobody can load them again."""

    policy: str
    versions: list[int]
    lane: str = ""


class CurrentWeights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="weights.current.v1"):
    """The controller's fold of weights.v1: what inference actors load next."""

    policy: str
    version: int
    manifest_key: str
    manifest_sha256: str
    weights_offset: int = 0


class ReplicaReported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="replica.reported.v1"):
    replica: str
    policy: str
    version: int
    healthy: bool
    load_ms: float = 0.0
    detail: str = ""


WeightsEvent = VersionPublished | VersionPinned | CanaryShared | VersionRolledBack | VersionPruned
CurrentEvent = CurrentWeights
ReplicaEvent = ReplicaReported
