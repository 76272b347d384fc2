"""Which sealed groups are trained, and which of their tokens. Pure.

A group is dropped with a reason: `infrastructure` (fewer than two rewarded members, or a reward that is no finite
number), `undecodable` (a member's records do not make a sequence), `origin` (evaluation), `consent` (production, or a
session that is somebody's, without a standing grant), `flat` (the declared reward component has no spread inside the
group). Tokens sampled more than `max_staleness` versions before the one that the batch's ordinal trains are masked;
their session stays in the group's baseline.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from odradek.streams.assembly.v1.advantage import advantages, spread
from odradek.streams.assembly.v1.sequence import Sequence
from odradek.streams.events.groups import GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.rewards import RewardAssigned


@dataclass(frozen=True, slots=True)
class GroupRecords:
    """A sealed group with everything its seal refers to. A member missing from `sequences` was undecodable."""

    offset: int
    sealed: GroupSealed
    rewards: Mapping[str, RewardAssigned]
    sequences: Mapping[str, Sequence]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member of a kept group, before it is known which batch it goes into."""

    member: SealedMember
    sequence: Sequence
    reward: RewardAssigned
    advantage: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A group that will be trained."""

    offset: int
    group_id: str
    candidates: list[Candidate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that will not, and why."""

    offset: int
    group_id: str
    reason: str
    sampled_tokens: list[int]


def select(group: GroupRecords, config: LaneConfigured, consents: Callable[[str], bool]) -> Kept | Dropped:
    """Keep or drop one group. `consents(subject)` says whether a grant stands at the offsets being read."""
    rewarded = [m for m in group.sealed.members if m.status == "rewarded"]
    lengths = [group.rewards[m.session_id].sampled_tokens for m in rewarded if m.session_id in group.rewards]

    def drop(reason: str) -> Dropped:
        return Dropped(group.offset, group.sealed.group_id, reason, lengths)

    if len(rewarded) < 2 or any(m.session_id not in group.rewards for m in rewarded):
        return drop("infrastructure")
    if any(m.session_id not in group.sequences for m in rewarded):
        return drop("undecodable")
    sequences = [group.sequences[m.session_id] for m in rewarded]
    if any(sequence.failed for sequence in sequences):
        return drop("infrastructure")
    if any(sequence.meta.origin == "eval" for sequence in sequences):
        return drop("origin")
    if any((s.meta.origin == "production" or s.meta.subject) and not consents(s.meta.subject) for s in sequences):
        return drop("consent")
    rewards = [group.rewards[m.session_id] for m in rewarded]
    declared = [r.components.get(config.spread_component, 0.0) for r in rewards]
    if not all(map(math.isfinite, [*declared, *(r.total for r in rewards)])):
        return drop("infrastructure")
    if not spread(declared, config.spread_floor):
        return drop("flat")
    values = advantages([r.total for r in rewards], config.advantage, config.spread_floor)
    candidates = [Candidate(*row) for row in zip(rewarded, sequences, rewards, values, strict=True)]
    return Kept(group.offset, group.sealed.group_id, candidates)


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups since the last batch, decided under one state of consent."""

    kept: list[Kept]
    dropped: list[Dropped]


def choose(groups: Iterable[GroupRecords], config: LaneConfigured, consents: Callable[[str], bool]) -> Choice:
    """Decide all groups since the last batch at once: what a batch holds is a function of its recorded offsets."""
    verdicts = [select(group, config, consents) for group in groups]
    return Choice(
        [v for v in verdicts if isinstance(v, Kept)],
        [v for v in verdicts if isinstance(v, Dropped)],
    )


def trained_masks(sequence: Sequence, ordinal: int, max_staleness: int) -> tuple[list[array[int]], int]:
    """Per segment the uint8 mask of trained tokens, and how many sampled tokens the staleness bound took out.

    The batch of ordinal b trains version b into b + 1; a token of version v is b - v versions behind.
    """
    masks: list[array[int]] = []
    stale = 0
    for segment in sequence.segments:
        mask = array("B", segment.mask)
        for at, (sampled, version) in enumerate(zip(segment.mask, segment.versions, strict=True)):
            if sampled and ordinal - version > max_staleness:
                mask[at] = 0
                stale += 1
        masks.append(mask)
    return masks, stale
