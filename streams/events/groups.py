"""groups.v1: the controller's decisions, one partition a lane. The only driving input of a lane's assembler."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import Budget

MemberStatus = Literal["rewarded", "ungraded", "missing"]
SealReason = Literal["complete", "deadline"]
DiscardReason = Literal["infrastructure", "cancelled", "deadline", "undecodable", "refused", "policy_version"]


class ParentVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The version of another policy that a branch starts from."""

    policy: str
    version: int
    manifest_key: str
    manifest_sha256: str


class LaneConfigured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lane.configured.v1"):
    """How batches of this lane are made and trained, from this offset on."""

    lane: str
    policy: str
    groups_per_batch: int
    attempts: int
    max_staleness: int
    """Versions the oldest token may lie behind the version that trains it; tokens beyond are masked."""
    advantage: Literal["dr_grpo", "grpo", "rloo"] = "dr_grpo"
    spread_component: str = "solved"
    """A group is kept only if this reward component differs inside it."""
    spread_floor: float = 1e-9
    """Deviations from the group's mean below this count as zero."""
    token_budget: int = 6000
    """Tokens in one packed micro-batch."""
    training: dict[str, Any] = {}
    """The trainer's settings (objective, optimiser, minibatches) as JSON values, by configuration name."""
    assembler_version: int = 1
    parent: ParentVersion | None = None
    """Where this lane's policy branched off: its versions and batches are numbered on from there, so that the
    staleness of tokens sampled before the branch stays right. None begins at version 0, the warm start."""
    tasks_low: list[int] = []
    """By partition of tasks.v1: tasks before this offset are not this lane's."""
    tenants_low: dict[str, list[int]] = {}
    """The same of each tenant's task topic, by name."""


class GroupOpened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.opened.v1"):
    group_id: str
    lane: str
    ordinal: int
    """Opening order within the lane, from 0."""
    task: RecordRef
    task_id: str
    task_digest: str
    purpose: Literal["rl", "eval"]
    policy: str
    sessions: list[str]
    """Deterministic ids of the members, one an attempt."""
    version: int
    """Current version when the group was opened."""
    pinned_version: int | None = None
    deadline_ms: int
    """Event time at which the controller stops waiting for members."""
    sessions_floor: list[int] = []
    """End offsets of sessions.v1 by partition at opening: no member's record lies before them."""
    tasks_low: list[int] = []
    """By partition of tasks.v1: every record before this offset is already decided."""
    tenants_low: dict[str, list[int]] = {}
    """The same of each tenant's task topic, by name."""
    idempotency_key: str = ""
    budget: Budget = Budget()
    labels: dict[str, str] = {}


class MemberReplaced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.member_replaced.v1"):
    """An attempt was lost to a fault of ours; a fresh one takes its place."""

    group_id: str
    lane: str
    lost_session: str
    new_session: str
    cause: str


class SealedMember(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    session_id: str
    status: MemberStatus
    partition: int = -1
    first_offset: int = -1
    last_offset: int = -1
    reward: RecordRef | None = None


class GroupSealed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.sealed.v1"):
    """The cut: exactly these records are the group, whatever arrives later."""

    group_id: str
    lane: str
    reason: SealReason
    members: list[SealedMember]
    mixed: bool = True
    """Whether the lane's declared reward component differs between members: what admission expects assembly to keep."""
    rescored: RecordRef | None = None
    """The seal that this one repeats under a later grader's rewards, in a lane of its own."""


class GroupDiscarded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="group.discarded.v1"):
    group_id: str
    lane: str
    reason: DiscardReason
    detail: str = ""
    task: RecordRef | None = None
    member_tokens: list[int] = []
    """Sampled tokens of the members that had finished: the length distribution of what was dropped."""
    unfinished: list[str] = []
    """Members without a verdict then: their sessions are still to end."""


GroupEvent = LaneConfigured | GroupOpened | MemberReplaced | GroupSealed | GroupDiscarded
