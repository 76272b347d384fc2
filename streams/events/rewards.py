"""rewards.v1: what the graders said of a session. Small, so that the controller need never read tokens."""

from __future__ import annotations

import msgspec

from odradek.streams.events.meta import RecordRef


class RewardAssigned(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reward.assigned.v1"):
    session_id: str
    group_id: str
    partition: int
    first_offset: int
    last_offset: int
    """Of the session's records on sessions.v1, both inclusive."""
    grader: str
    grader_version: str
    components: dict[str, float]
    """Each part by name, e.g. solved, turns, errors."""
    total: float
    """The declared combination of the components."""
    tests_passed: list[str] = []
    tests_failed: list[str] = []
    notes: list[str] = []
    sampled_tokens: int = 0
    oldest_version: int = 0
    newest_version: int = 0
    reads_before_edit: bool | None = None
    """None when nothing was edited."""
    parallel_turns: int = 0
    turns: int = 0
    grading_ms: float = 0.0


class RewardUngraded(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reward.ungraded.v1"):
    """No score: a fault of ours. Kept out of the group's mean; `retryable` asks the controller for a fresh attempt."""

    session_id: str
    group_id: str
    partition: int
    first_offset: int
    last_offset: int
    grader: str
    grader_version: str
    cause: str
    retryable: bool = True


class RewardRevised(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reward.revised.v1"):
    """A later grader's opinion. After the seal it counts only in rescore."""

    session_id: str
    group_id: str
    grader: str
    grader_version: str
    components: dict[str, float]
    total: float
    reason: str
    revises: RecordRef | None = None
    """The verdict that stood, which stays what its batch was made of."""
    partition: int = -1
    first_offset: int = -1
    last_offset: int = -1
    """Of the session's records on sessions.v1, both inclusive."""
    sampled_tokens: int = 0


RewardEvent = RewardAssigned | RewardUngraded | RewardRevised
