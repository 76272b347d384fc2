"""The life of a group as a fold of groups.v1 and rewards.v1. Pure.

opened -> (member replaced)* -> sealed | discarded. A reward that arrives after the seal changes nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from odradek.actors.controller.identity import session_id
from odradek.streams.events.groups import (
    DiscardReason,
    GroupDiscarded,
    GroupOpened,
    GroupSealed,
    MemberReplaced,
    SealedMember,
    SealReason,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded

MAX_REPLACEMENTS = 2
"""Fresh attempts a group may have for members lost to faults of ours. Too low discards groups at every hiccup; too
high keeps retrying a task that breaks our sandboxes."""
MIN_REWARDED = 2
"""Members a group needs to be sealed at its deadline: fewer have no mean to compare with."""

DETAIL_CHARACTERS = 2_000
"""Characters of a discard's detail, which joins the causes of all members. A decision stays a small record."""

Verdict = RewardAssigned | RewardUngraded


@dataclass(slots=True)
class GroupState:
    """One open group."""

    opened: GroupOpened
    members: list[str]
    spread_component: str = "solved"
    replaced: int = 0
    verdicts: dict[str, tuple[RecordRef, Verdict]] = field(default_factory=dict)

    @classmethod
    def of(cls, opened: GroupOpened, spread_component: str) -> GroupState:
        return cls(opened, list(opened.sessions), spread_component)

    def replace(self, event: MemberReplaced) -> None:
        self.members[self.members.index(event.lost_session)] = event.new_session
        self.replaced += 1

    def record(self, ref: RecordRef, verdict: Verdict) -> None:
        """First verdict of a member wins; a grader that ran twice says the same."""
        self.verdicts.setdefault(verdict.session_id, (ref, verdict))

    @property
    def unfinished(self) -> list[str]:
        return [member for member in self.members if member not in self.verdicts]

    def decide(self, now_ms: int) -> list[MemberReplaced | GroupSealed | GroupDiscarded]:
        """What to write now, if anything. `now_ms` is the controller's clock; its decision is what counts."""
        lost = [m for m in self.members if m in self.verdicts and isinstance(self.verdicts[m][1], RewardUngraded)]
        if lost and self.opened.purpose == "rl":
            return self._replace_or_discard(lost)
        if not self.unfinished:
            return [self._sealed("complete")]
        if now_ms >= self.opened.deadline_ms:
            rewarded = len(self.members) - len(self.unfinished)
            if rewarded >= MIN_REWARDED or self.opened.purpose == "eval":
                return [self._sealed("deadline")]
            return [self.discarded("deadline", f"{rewarded} of {len(self.members)} members finished")]
        return []

    def _replace_or_discard(self, lost: list[str]) -> list[MemberReplaced | GroupSealed | GroupDiscarded]:
        causes = {m: self._cause(m) for m in lost}
        terminal = any(not self._retryable(m) for m in lost)
        if terminal or self.replaced + len(lost) > MAX_REPLACEMENTS:
            return [self.discarded("infrastructure", "; ".join(sorted(set(causes.values()))))]
        return [
            MemberReplaced(
                group_id=self.opened.group_id,
                lane=self.opened.lane,
                lost_session=member,
                new_session=session_id(self.opened.group_id, self.members.index(member), self.replaced + 1 + i),
                cause=causes[member],
            )
            for i, member in enumerate(lost)
        ]

    def _retryable(self, member: str) -> bool:
        verdict = self.verdicts[member][1]
        return isinstance(verdict, RewardUngraded) and verdict.retryable

    def _cause(self, member: str) -> str:
        verdict = self.verdicts[member][1]
        return verdict.cause if isinstance(verdict, RewardUngraded) else ""

    def _member(self, member: str) -> SealedMember:
        if member not in self.verdicts:
            return SealedMember(session_id=member, status="missing")
        ref, verdict = self.verdicts[member]
        return SealedMember(
            session_id=member,
            status="rewarded" if isinstance(verdict, RewardAssigned) else "ungraded",
            partition=verdict.partition,
            first_offset=verdict.first_offset,
            last_offset=verdict.last_offset,
            reward=ref,
        )

    def _sealed(self, reason: SealReason) -> GroupSealed:
        return GroupSealed(
            group_id=self.opened.group_id,
            lane=self.opened.lane,
            reason=reason,
            members=[self._member(member) for member in self.members],
            mixed=self._mixed(),
        )

    def _mixed(self) -> bool:
        values = {
            verdict.components.get(self.spread_component, 0.0)
            for _, verdict in self.verdicts.values()
            if isinstance(verdict, RewardAssigned)
        }
        return len(values) > 1

    def discarded(self, reason: DiscardReason, detail: str) -> GroupDiscarded:
        """The group given up; carries the lengths of what had finished, so that a length bias can be seen."""
        finished = [v for _, v in self.verdicts.values() if isinstance(v, RewardAssigned)]
        return GroupDiscarded(
            group_id=self.opened.group_id,
            lane=self.opened.lane,
            reason=reason,
            detail=detail[:DETAIL_CHARACTERS],
            task=self.opened.task,
            member_tokens=[v.sampled_tokens for v in finished],
            unfinished=self.unfinished,
        )
