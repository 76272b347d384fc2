"""batches.v1: a batch is references and hashes, never tokens; and the steps that consumed them."""

from __future__ import annotations

import msgspec

from odradek.streams.events.meta import RecordRef


class BatchMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session of a batch: where its records lie and what its canonical sequence hashes to."""

    session_id: str
    group_id: str
    partition: int
    first_offset: int
    last_offset: int
    reward: RecordRef
    total: float
    advantage: float
    """Rounded once to float32, stored exactly."""
    tokens: int
    trained_tokens: int
    masked_stale_tokens: int = 0
    oldest_version: int = 0
    newest_version: int = 0
    subject: str = ""
    leaf: str = ""
    """Hex digest of the canonical sequence (HMAC under the subject's key where there is one)."""
    truncated: bool = False


class DroppedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    group_id: str
    offset: int
    reason: str
    """flat, infrastructure, stale, consent, origin, undecodable."""
    sampled_tokens: list[int] = []


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Indices into `members`, in packing order."""

    members: list[int]
    tokens: int


class BatchAssembled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="batch.assembled.v1"):
    batch_id: str
    lane: str
    policy: str
    ordinal: int
    """From 0; trains version ordinal into ordinal + 1."""
    groups: list[int]
    """Offsets of the kept group.sealed records on groups.v1, in order."""
    dropped: list[DroppedGroup]
    members: list[BatchMember]
    layout: list[MicroBatch]
    merkle_root: str
    assembler_version: int
    config_offset: int
    """Offset of the lane.configured record in force."""
    input_offset: int
    """Last offset of the lane's groups.v1 partition consumed by this batch: the assembler resumes after it."""
    subjects_offset: int = 0
    weights_offset: int = 0


class StepCompleted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="step.completed.v1"):
    """The commit of one optimiser step; in one transaction with weights.v1's version.published."""

    lane: str
    policy: str
    step: int
    """Turns version step - 1 into version step."""
    batch_id: str
    batch_offset: int
    """Offset of batch.assembled on batches.v1: the trainer resumes after it."""
    manifest_key: str
    manifest_sha256: str
    metrics: dict[str, float] = {}
    left_out: list[str] = []
    """Sessions whose consent was gone when the step was taken: zero weight."""
    subjects_offset: int = 0


class IncarnationBegun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="incarnation.begun.v1"):
    """`odradek restore`: log and object store are of different moments, so training begins anew at the newest version
    complete in both. In one transaction with weights.v1's version.published."""

    lane: str
    policy: str
    incarnation: str
    """First part of the keys of its manifests; never used before, so that no earlier history's is ever adopted."""
    version: int
    batch_offset: int
    """The trainer resumes after it; -1 is before the first batch."""
    manifest_key: str
    """Of `version`, copied whole into this incarnation."""
    manifest_sha256: str
    restored_from: str = ""
    """Its manifest in the incarnation before; empty for the warm start."""
    given_up: list[int] = []
    """Versions that the log has and the store has not: trained again from their batches."""
    reason: str = ""


BatchEvent = BatchAssembled | StepCompleted | IncarnationBegun
