"""A batch from kept groups, and the arrays that are trained from a batch.

`build` writes references and hashes; `materialise` turns the same sequences back into arrays. Trainer and replay call
the same `materialise`, so rebuilding a batch is the training path itself. `verify` says for each leaf whether the
rebuilt member has the recorded hash.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from odradek.streams.assembly.v1 import merkle
from odradek.streams.assembly.v1.pack import pack
from odradek.streams.assembly.v1.select import Candidate, Dropped, GroupRecords, Kept, choose, trained_masks
from odradek.streams.assembly.v1.sequence import Sequence
from odradek.streams.events.batches import BatchAssembled, BatchMember, DroppedGroup
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.privacy.leaves import LeafKey

VERSION = 1
BATCH_NAMESPACE = uuid.UUID("0d0a6b0e-7a52-5b5e-8a0e-6b7d9c1f2a33")
"""Namespace of batch ids (RFC 9562, version 5)."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The offsets a batch was made from."""

    config_offset: int
    input_offset: int
    subjects_offset: int
    weights_offset: int


@dataclass(frozen=True, slots=True)
class MicroArrays:
    """One packed micro-batch. T tokens, S sequences (a session's segments are sequences of their own).

    tokens, positions, versions int32 [T]; mask uint8 [T]; logprobs, advantages float32 [T]; starts int32 [S + 1].
    """

    tokens: array[int]
    positions: array[int]
    mask: array[int]
    logprobs: array[float]
    advantages: array[float]
    versions: array[int]
    starts: array[int]


def no_keys(_subject: str) -> bytes | None:
    """The `LeafKey` of a deployment without subject keys."""
    return None


def build(
    kept: Many[Kept],
    dropped: Many[Dropped],
    config: LaneConfigured,
    ordinal: int,
    positions: Positions,
    leaf_key: LeafKey = no_keys,
    recorded: Mapping[str, BatchMember] | None = None,
) -> BatchAssembled:
    """The batch event of `kept` groups. Pure: the same inputs give the same bytes. Raises KeyError if a member's
    subject was erased, unless `recorded` has that member: its leaf, which nobody can make again, is taken from there.
    """
    members = [
        _member(group, one, config, ordinal, leaf_key, (recorded or {}).get(one.sequence.session_id))
        for group in kept
        for one in group.candidates
    ]
    return BatchAssembled(
        batch_id=str(uuid.uuid5(BATCH_NAMESPACE, f"{config.lane}/{ordinal}/{positions.input_offset}")),
        lane=config.lane,
        policy=config.policy,
        ordinal=ordinal,
        groups=[group.offset for group in kept],
        dropped=[
            DroppedGroup(group_id=d.group_id, offset=d.offset, reason=d.reason, sampled_tokens=d.sampled_tokens)
            for d in dropped
        ],
        members=members,
        layout=pack([member.tokens for member in members], config.token_budget),
        merkle_root=merkle.root([member.leaf for member in members]),
        assembler_version=VERSION,
        config_offset=positions.config_offset,
        input_offset=positions.input_offset,
        subjects_offset=positions.subjects_offset,
        weights_offset=positions.weights_offset,
    )


def _member(
    group: Kept,
    one: Candidate,
    config: LaneConfigured,
    ordinal: int,
    leaf_key: LeafKey,
    recorded: BatchMember | None,
) -> BatchMember:
    sequence = one.sequence
    masks, stale = trained_masks(sequence, ordinal, config.max_staleness)
    try:
        key = leaf_key(sequence.meta.subject)
        leaf = _leaf(sequence, masks, one.advantage, key, recorded.leaf if recorded is not None else "")
    except KeyError:
        if recorded is None:
            raise
        leaf = recorded.leaf
    versions = sequence.sampled_versions()
    assert one.member.reward is not None
    return BatchMember(
        session_id=sequence.session_id,
        group_id=group.group_id,
        partition=one.member.partition,
        first_offset=one.member.first_offset,
        last_offset=one.member.last_offset,
        reward=one.member.reward,
        total=one.reward.total,
        advantage=one.advantage,
        tokens=sequence.tokens,
        trained_tokens=sum(sum(mask) for mask in masks),
        masked_stale_tokens=stale,
        oldest_version=min(versions, default=0),
        newest_version=max(versions, default=0),
        subject=sequence.meta.subject,
        leaf=leaf,
        truncated=sequence.truncated,
    )


def _leaf(sequence: Sequence, masks: list[array[int]], advantage: float, key: bytes | None, recorded: str) -> str:
    """The member's leaf; a plain one where that is what was recorded, at a time before its subject had a key."""
    leaf = merkle.leaf(sequence, masks, advantage, key)
    if key is None or leaf == recorded:
        return leaf
    plain = merkle.leaf(sequence, masks, advantage)
    return plain if plain == recorded else leaf


def reassemble(
    batch: BatchAssembled,
    groups: Many[GroupRecords],
    config: LaneConfigured,
    consents: Callable[[str], bool],
    leaf_key: LeafKey = no_keys,
) -> BatchAssembled:
    """What assembling the same groups at the recorded offsets gives; an erased member keeps its recorded leaf."""
    chosen = choose(groups, config, consents)
    positions = Positions(batch.config_offset, batch.input_offset, batch.subjects_offset, batch.weights_offset)
    recorded = {member.session_id: member for member in batch.members}
    return build(chosen.kept, chosen.dropped, config, batch.ordinal, positions, leaf_key, recorded)


def materialise(
    batch: BatchAssembled,
    sequences: Mapping[str, Sequence],
    max_staleness: int,
    left_out: frozenset[str] = frozenset(),
) -> list[MicroArrays]:
    """The arrays of a batch, micro-batch by micro-batch in layout order.

    `sequences`: by session id, rebuilt from exactly the records the batch names. `left_out`: sessions whose consent
    is gone by the time of the step; their tokens keep their place with mask 0.
    """
    return [
        _micro([batch.members[at] for at in micro.members], batch.ordinal, sequences, max_staleness, left_out)
        for micro in batch.layout
    ]


def owners(batch: BatchAssembled, sequences: Mapping[str, Sequence]) -> list[int]:
    """For each sequence of the materialised arrays, in order, the index of its member: segments share one."""
    return [
        at for micro in batch.layout for at in micro.members for _ in sequences[batch.members[at].session_id].segments
    ]


def experts(batch: BatchAssembled, sequences: Mapping[str, Sequence]) -> list[bytes]:
    """For each sequence of the materialised arrays, in order, its routed experts as logged. They are in no leaf: they
    say how a token was computed, not which it was."""
    return [
        bytes(segment.experts)
        for micro in batch.layout
        for at in micro.members
        for segment in sequences[batch.members[at].session_id].segments
    ]


def _micro(
    members: list[BatchMember],
    ordinal: int,
    sequences: Mapping[str, Sequence],
    max_staleness: int,
    left_out: frozenset[str],
) -> MicroArrays:
    out = MicroArrays(
        tokens=array("i"),
        positions=array("i"),
        mask=array("B"),
        logprobs=array("f"),
        advantages=array("f"),
        versions=array("i"),
        starts=array("i", [0]),
    )
    for member in members:
        sequence = sequences[member.session_id]
        masks, _ = trained_masks(sequence, ordinal, max_staleness)
        for segment, mask in zip(sequence.segments, masks, strict=True):
            length = len(segment)
            out.tokens.extend(segment.tokens)
            out.positions.extend(range(length))
            out.mask.extend(bytes(length) if member.session_id in left_out else mask)
            out.logprobs.extend(segment.logprobs)
            out.advantages.extend([member.advantage] * length)
            out.versions.extend(segment.versions)
            out.starts.append(out.starts[-1] + length)
    return out


def verify(
    batch: BatchAssembled, sequences: Mapping[str, Sequence], max_staleness: int, leaf_key: LeafKey = no_keys
) -> dict[str, str]:
    """By session id: `rebuilt`, `erased` (its key is gone), `missing` (no sequence) or `mismatch`."""
    verdicts: dict[str, str] = {}
    for member in batch.members:
        try:
            key = leaf_key(member.subject)
        except KeyError:
            verdicts[member.session_id] = "erased"
            continue
        sequence = sequences.get(member.session_id)
        if sequence is None:
            verdicts[member.session_id] = "missing"
            continue
        masks, _ = trained_masks(sequence, batch.ordinal, max_staleness)
        same = _leaf(sequence, masks, member.advantage, key, member.leaf) == member.leaf
        verdicts[member.session_id] = "rebuilt" if same else "mismatch"
    return verdicts
