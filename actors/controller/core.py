"""The controller's decisions: a pure state machine over records in, decisions out.

Owns admission, sealing and the fold of weights.v1. It holds no state that the log can't rebuild: `apply_group` folds
its own earlier decisions, `on_*` feed what other topics say, `decide` returns what to append now, in one transaction.
Time is handed in. What it promises:
- a task record leads to at most one group; what a task topic says is `intake.py`'s, who is next `admission.py`'s;
- every member of every open group is placed until it has a verdict, and every member that its group was closed without
  until it has ended (`endings.py`);
- an open group is closed at its deadline: sealed with the members that have a verdict, or discarded with the reason;
- only this fold writes weights.current.v1, so a training commit never undoes a pin or a roll-back.

Guarantee 12 (tests/GUARANTEES.md): test_controller_core.py, test_reward_actor.py, test_session_runner.py,
test_engine_actor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from odradek.actors.controller.admission import Backlog, Shares, TaskQueue, WaitingTask
from odradek.actors.controller.endings import Endings
from odradek.actors.controller.groups import GroupState, Verdict
from odradek.actors.controller.identity import group_id, session_id
from odradek.actors.controller.intake import Intake, tenant_of
from odradek.actors.tasks.refusal import MAX_ATTEMPTS
from odradek.streams import topics
from odradek.streams.events.batches import BatchAssembled, BatchEvent, IncarnationBegun, StepCompleted
from odradek.streams.events.groups import (
    GroupDiscarded,
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    MemberReplaced,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskEvent, TaskPublished
from odradek.streams.events.weights import (
    CurrentWeights,
    VersionPinned,
    VersionPruned,
    VersionPublished,
    VersionRolledBack,
    WeightsEvent,
)
from odradek.streams.pruning import taken
from odradek.streams.sealing import GroupRule

RL_LANE = "main-0"
"""Lane of RL groups: its partition of groups.v1 drives the assembler."""
EVAL_LANE = "eval-1"
"""Lane of evaluation groups: no assembler ever reads it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A member that must be running somewhere. `fresh`: nothing of it can be on the log yet. `closed`: its group is,
    and all that is wanted of it is its end."""

    session_id: str
    group: GroupState
    attempt: int
    fresh: bool
    closed: bool = False


@dataclass(slots=True)
class PolicyWeights:
    """The fold of weights.v1 for one policy."""

    published: dict[int, VersionPublished] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)
    """Of `published`: nobody can load them any more."""
    pinned: int | None = None
    held_at: int | None = None
    """Version a roll-back went to; a newer publication moves on from it."""
    written: CurrentWeights | None = None

    def give_up_above(self, version: int) -> None:
        """A new incarnation begins at `version`: no pin, roll-back or publication above it stands any more."""
        self.published = {number: one for number, one in self.published.items() if number <= version}
        self.pruned = {number for number in self.pruned if number <= version}
        self.pinned = self.pinned if self.pinned in self.published else None
        self.held_at = self.held_at if self.held_at in self.published else None

    @property
    def current(self) -> int | None:
        if self.pinned is not None:
            return self.pinned
        if self.held_at is not None:
            return self.held_at
        return max(self.published) if self.published else None


class Controller:
    """See the module docstring. All `on_*` methods are idempotent for a record already seen."""

    def __init__(self, lane: LaneConfigured, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.lane = lane
        self.groups: dict[str, GroupState] = {}
        self.tasks: dict[str, TaskPublished] = {}
        """By group id the task of an open group, where this process has seen it."""
        self.endings = Endings()
        self.intake = Intake(lane.policy, max_attempts)
        self.backlog = Backlog(lane.groups_per_batch, lane.max_staleness)
        self.weights: dict[str, PolicyWeights] = {}
        self.opened_count = 0
        self.assembled = 0
        self.trained = 0
        self.rule = GroupRule()
        self.served: dict[str, int] = {}
        self.sealed_after: list[int] = []
        self._known_members: set[str] = set()
        """Of open groups."""

    @property
    def queue(self) -> TaskQueue:
        """Tasks that have no group yet."""
        return self.intake.queue

    # -- its own past ------------------------------------------------------------------------------------------

    def apply_group(self, offset: int, event: GroupEvent, now_ms: int = 0) -> None:
        """Fold one of its own decisions: just written, or read back at start-up, and when it was written. What does not
        count for the assembler does not count here, nor does what another lane of the same partition holds."""
        if event.lane not in (self.lane.lane, EVAL_LANE) or not self.rule.accepts(event):
            return
        match event:
            case LaneConfigured():
                pass
            case GroupOpened():
                self._opened(event)
            case MemberReplaced():
                if event.group_id in self.groups:
                    self.groups[event.group_id].replace(event)
            case GroupSealed():
                self._closed(event, now_ms)
                if event.lane == self.lane.lane:
                    self.backlog.record_sealed(event.mixed)
                    if event.mixed:
                        self.sealed_after.append(offset)
            case GroupDiscarded():
                self._closed(event, now_ms)
                if event.task is not None:
                    self.intake.settled(event.task)
        self._count()

    def _opened(self, event: GroupOpened) -> None:
        served = event.policy == self.lane.policy  # an evaluation of another policy is for who serves that policy
        if served:
            self.groups[event.group_id] = GroupState.of(event, self.lane.spread_component)
            tenant = tenant_of(event.task)
            self.served[tenant] = max(event.ordinal, self.served.get(tenant, -1))
        self.intake.opened(event, served=served)
        self.opened_count += 1

    def _closed(self, event: GroupSealed | GroupDiscarded, now_ms: int) -> None:
        group = self.groups.pop(event.group_id, None)
        self.tasks.pop(event.group_id, None)
        if group is not None:
            self._known_members.difference_update(group.members)
            self.intake.closed(group.opened, event.reason)
            self.endings.closed(group, event, now_ms)

    def _count(self) -> None:
        lane = self.lane.lane
        self.backlog.open_groups = sum(1 for g in self.groups.values() if g.opened.lane == lane)
        self.backlog.sealed_groups = len(self.sealed_after)

    # -- what the log says -------------------------------------------------------------------------------------

    def on_task(self, ref: RecordRef, event: TaskEvent, *, again: bool = False) -> None:
        """A record of a task topic. `again`: one that was passed over before, and that a person has let go."""
        self.intake.on_task(ref, event, again=again)

    def on_verdict(self, ref: RecordRef, event: Verdict) -> None:
        """A record of rewards.v1 (assigned or ungraded)."""
        self.endings.ended(event.session_id)
        if event.group_id in self.groups and event.session_id in self.groups[event.group_id].members:
            self.groups[event.group_id].record(ref, event)

    def on_batch(self, event: BatchEvent) -> None:
        """A record of batches.v1: how far assembly and training are."""
        if isinstance(event, BatchAssembled) and event.lane == self.lane.lane:
            self.assembled = event.ordinal + 1
            self.sealed_after = [offset for offset in self.sealed_after if offset > event.input_offset]
        elif isinstance(event, StepCompleted) and event.lane == self.lane.lane:
            self.trained = event.step
        elif isinstance(event, IncarnationBegun) and event.lane == self.lane.lane:
            self.trained = event.version
        self.backlog.pending_batches = max(0, self.assembled - self.trained)
        self._count()

    def on_weights(self, event: WeightsEvent) -> None:
        """A record of weights.v1."""
        weights = self.weights.setdefault(event.policy, PolicyWeights())
        match event:
            case VersionPublished():
                if event.restored:
                    weights.give_up_above(event.version)
                weights.published[event.version] = event
                weights.pruned.discard(event.version)
                if weights.held_at is not None and event.version > weights.held_at:
                    weights.held_at = None
            case VersionPinned() if event.version not in weights.pruned:
                weights.pinned = event.version
            case VersionRolledBack() if event.to_version not in weights.pruned:
                weights.held_at = event.to_version
            case VersionPruned():
                weights.pruned |= taken(event, weights.published, weights.pinned, weights.held_at)
            case _:
                pass

    def on_current(self, event: CurrentWeights) -> None:
        """What this fold wrote last (read back at start-up)."""
        self.weights.setdefault(event.policy, PolicyWeights()).written = event

    # -- decisions ---------------------------------------------------------------------------------------------

    def decide(self, now_ms: int, free_slots: int, sessions_floor: Sequence[int]) -> list[GroupEvent]:
        """Everything to append to groups.v1 now. Fold the result with `apply_group` once it is committed."""
        self.endings.forget(now_ms)
        decisions: list[GroupEvent] = self._refusals()
        for group in self.groups.values():
            if self.intake.cancelled(group.opened):
                decisions.append(group.discarded("cancelled", "the task was cancelled"))
            else:
                decisions.extend(group.decide(now_ms))
        return decisions + self._open(now_ms, free_slots, list(sessions_floor))

    def room(self, limit: int, hosted: int) -> int:
        """How many sessions may be opened. `hosted`: all that run on the hosts, people's included: those are admitted
        by nobody, take their slots first, and leave the rest to rollouts."""
        return limit - hosted

    def may_open(self, free_slots: int) -> bool:
        """Whether `decide` would open a group now: only then the caller needs to know where sessions.v1 ends."""
        return self._next(self.shares(), free_slots) is not None

    def shares(self) -> Shares:
        """What each tenant has under way."""
        shares = Shares(served=dict(self.served))
        for group in self.groups.values():
            tenant = tenant_of(group.opened.task)
            shares.sessions[tenant] = shares.sessions.get(tenant, 0) + len(group.unfinished)
        return shares

    def _next(self, shares: Shares, free_slots: int) -> WaitingTask | None:
        """The task to open now. RL waits for the staleness bound, and no tenant's evaluation waits behind it."""
        if self.weights.get(self.lane.policy, PolicyWeights()).current is None:
            return None
        rl = self.backlog.may_open()
        head = shares.next_of(head for head in self.queue.heads() if rl or head.task.purpose == "eval")
        return head if head is not None and head.task.attempts <= free_slots else None

    def decide_weights(self) -> list[CurrentWeights]:
        """Changes of what to serve."""
        changes = []
        for policy, weights in self.weights.items():
            version = weights.current
            if version is None or version not in weights.published:
                continue
            published = weights.published[version]
            if weights.written is None or weights.written.manifest_key != published.manifest_key:
                changes.append(
                    CurrentWeights(
                        policy=policy,
                        version=version,
                        manifest_key=published.manifest_key,
                        manifest_sha256=published.manifest_sha256,
                    )
                )
        return changes

    def placements(self) -> list[Placement]:
        """Every member without a verdict, oldest group first. A member is fresh only the first time it is named
        by the controller that opened its group."""
        running = [
            Placement(member, group, attempt, member not in self._known_members)
            for group in self.groups.values()
            for attempt, member in enumerate(group.members)
            if member not in group.verdicts
        ]
        ending = [Placement(one.session_id, one.group, one.attempt, False, closed=True) for one in self.endings]
        return running + ending

    def placed(self, session: str) -> None:
        """The session was handed to an actor; from now on it may have a history."""
        if session not in self.endings:
            self._known_members.add(session)

    def recovered(self) -> None:
        """Start-up is over: members of groups folded so far may have been placed by a predecessor. Groups are in the
        order of their opening again, whichever partition was read first."""
        self.groups = dict(sorted(self.groups.items(), key=lambda item: item[1].opened.ordinal))
        for group in self.groups.values():
            self._known_members.update(group.members)

    def _refusals(self) -> list[GroupEvent]:
        lane, refused = self.lane.lane, self.intake.refused
        self.intake.refused = []
        return [
            GroupDiscarded(group_id=group_id(one.ref), lane=lane, reason=one.reason, detail=one.detail, task=one.ref)
            for one in refused
        ]

    def _open(self, now_ms: int, free_slots: int, sessions_floor: list[int]) -> list[GroupEvent]:
        opened: list[GroupEvent] = []
        backlog_before = self.backlog.open_groups
        shares = self.shares()
        while (head := self._next(shares, free_slots)) is not None:
            self.queue.pop(head.tenant)
            task = head.task
            weights = self.weights[task.policy]
            version = weights.current
            assert version is not None
            pinned = task.policy_version if task.policy_version is not None or task.purpose == "rl" else version
            if pinned is not None and (pinned not in weights.published or pinned in weights.pruned):
                why = "was pruned" if pinned in weights.pruned else "does not exist"
                self.intake.turn_away(head, "policy_version", f"version {pinned} of policy {task.policy} {why}")
                continue
            shares.took(head.tenant, task.attempts, self.opened_count + len(opened))
            opened.append(self._group(head, version, pinned, now_ms, len(opened), sessions_floor))
            free_slots -= task.attempts
            if task.purpose == "rl":
                self.backlog.open_groups += 1
        self.backlog.open_groups = backlog_before
        return opened

    def _group(
        self, head: WaitingTask, version: int, pinned: int | None, now_ms: int, extra: int, floor: list[int]
    ) -> GroupOpened:
        task = head.task
        group = group_id(head.ref)
        self.tasks[group] = task
        return GroupOpened(
            group_id=group,
            lane=self.lane.lane if task.purpose == "rl" else EVAL_LANE,
            ordinal=self.opened_count + extra,
            task=head.ref,
            task_id=task.task_id,
            task_digest=head.digest,
            purpose=task.purpose,
            policy=task.policy,
            sessions=[session_id(group, attempt) for attempt in range(task.attempts)],
            version=version,
            pinned_version=pinned,
            deadline_ms=now_ms + int(task.deadline_seconds * 1000),
            sessions_floor=floor,
            tasks_low=self.intake.low(topics.TASKS.name),
            tenants_low=self.intake.tenants_low(),
            idempotency_key=task.idempotency_key,
            budget=task.budget,
            labels=task.labels,
        )
