"""The controller's decisions: a pure state machine over records in, decisions out.

Owns admission, sealing and the fold of weights.v1. It holds no state that the log can't rebuild: `apply_group` folds
its own earlier decisions, `on_*` feed what other topics say, `decide` returns what to append now, in one transaction.
Time is handed in. What it promises:
- a task record leads to at most one group; the same idempotency key (or task id) twice is one task;
- every member of every open group is placed until it has a verdict;
- a task that can't be run, and RL on a task that is published for evaluation, are refused with the reason;
- only this fold writes weights.current.v1, so a training commit never undoes a pin or a roll-back.

Guarantee 12 (tests/GUARANTEES.md): test_controller_core.py, test_reward_actor.py, test_session_runner.py,
test_engine_actor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from odradek.actors.controller.admission import Backlog, TaskQueue, WaitingTask
from odradek.actors.controller.groups import GroupState, Verdict
from odradek.actors.controller.identity import group_id, session_id, task_digest
from odradek.actors.tasks.refusal import MAX_ATTEMPTS, refusal
from odradek.streams.events.batches import BatchAssembled, BatchEvent, IncarnationBegun, StepCompleted
from odradek.streams.events.groups import (
    DiscardReason,
    GroupDiscarded,
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    MemberReplaced,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskCancelled, TaskEvent, TaskPublished
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
    """A member that must be running somewhere. `fresh`: nothing of it can be on the log yet."""

    session_id: str
    group: GroupState
    attempt: int
    fresh: bool


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
        self._max_attempts = max_attempts
        self.groups: dict[str, GroupState] = {}
        self.tasks: dict[str, TaskPublished] = {}
        """By group id the task of an open group, where this process has seen it."""
        self.queue = TaskQueue()
        self.backlog = Backlog(lane.groups_per_batch, lane.max_staleness)
        self.weights: dict[str, PolicyWeights] = {}
        self.opened_count = 0
        self.assembled = 0
        self.trained = 0
        self._rule = GroupRule()
        self._task_position: dict[int, int] = {}
        self._waiting_offsets: dict[int, set[int]] = {}
        self._groups_of_tasks: set[RecordRef] = set()
        self._keys: set[str] = set()
        self._eval_digests: set[str] = set()
        self._cancelled: set[str] = set()
        self._refusals: list[GroupDiscarded] = []
        self._known_members: set[str] = set()
        self._sealed_after: list[int] = []

    # -- its own past ------------------------------------------------------------------------------------------

    def apply_group(self, offset: int, event: GroupEvent) -> None:
        """Fold one of its own decisions: just written, or read back at start-up. What does not count for the assembler
        does not count here, nor does what another lane of the same partition holds."""
        if event.lane not in (self.lane.lane, EVAL_LANE) or not self._rule.accepts(event):
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
                self._closed(event.group_id)
                if event.lane == self.lane.lane:
                    self.backlog.record_sealed(event.mixed)
                    if event.mixed:
                        self._sealed_after.append(offset)
            case GroupDiscarded():
                self._closed(event.group_id)
                if event.task is not None:
                    self._groups_of_tasks.add(event.task)
                    self._decided(event.task)
        self._count()

    def _opened(self, event: GroupOpened) -> None:
        if event.policy == self.lane.policy:  # an evaluation of another policy is for who serves that policy
            self.groups[event.group_id] = GroupState.of(event, self.lane.spread_component)
            self._keys.add(event.idempotency_key or event.task_id)
        self._groups_of_tasks.add(event.task)
        self._decided(event.task)
        if event.purpose == "eval":
            self._eval_digests.add(event.task_digest)
        self.opened_count += 1

    def _closed(self, group: str) -> None:
        self.groups.pop(group, None)
        self.tasks.pop(group, None)

    def _count(self) -> None:
        lane = self.lane.lane
        self.backlog.open_groups = sum(1 for g in self.groups.values() if g.opened.lane == lane)
        self.backlog.sealed_groups = len(self._sealed_after)

    # -- what the log says -------------------------------------------------------------------------------------

    def on_task(self, ref: RecordRef, event: TaskEvent) -> None:
        """A record of tasks.v1."""
        if ref.offset < self._task_position.get(ref.partition, 0):
            return
        self._task_position[ref.partition] = ref.offset + 1
        if isinstance(event, TaskCancelled):
            self._cancelled.add(event.task_id)
            self.queue.remove(event.task_id)
            return
        if ref in self._groups_of_tasks or event.task_id in self._cancelled:
            return
        key = event.idempotency_key or event.task_id
        if key in self._keys:
            return
        self._keys.add(key)
        wrong = refusal(event, self._max_attempts) or self._unserved(event)
        if wrong is not None:
            self._refuse(ref, "refused", f"task {event.task_id[:80]}: {wrong}")
            return
        digest = task_digest(event)
        if event.purpose == "eval":
            self._eval_digests.add(digest)
        elif digest in self._eval_digests:
            self._refuse(ref, "refused", f"task {event.task_id} is published for evaluation; RL on it is refused")
            return
        self._waiting_offsets.setdefault(ref.partition, set()).add(ref.offset)
        self.queue.push(WaitingTask(ref, event, digest))

    def _unserved(self, task: TaskPublished) -> str | None:
        """A deployment serves one policy. A task for another would wait for ever, at the head of everybody's queue."""
        if task.policy == self.lane.policy:
            return None
        return f"policy: {task.policy!r} is not served here, expected {self.lane.policy!r}"

    def on_verdict(self, ref: RecordRef, event: Verdict) -> None:
        """A record of rewards.v1 (assigned or ungraded)."""
        if event.group_id in self.groups and event.session_id in self.groups[event.group_id].members:
            self.groups[event.group_id].record(ref, event)

    def on_batch(self, event: BatchEvent) -> None:
        """A record of batches.v1: how far assembly and training are."""
        if isinstance(event, BatchAssembled) and event.lane == self.lane.lane:
            self.assembled = event.ordinal + 1
            self._sealed_after = [offset for offset in self._sealed_after if offset > event.input_offset]
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
        decisions: list[GroupEvent] = list(self._refusals)
        self._refusals = []
        for group in self.groups.values():
            if group.opened.task_id in self._cancelled:
                decisions.append(group.discarded("cancelled", "the task was cancelled"))
            else:
                decisions.extend(group.decide(now_ms))
        return decisions + self._open(now_ms, free_slots, list(sessions_floor))

    def may_open(self, free_slots: int) -> bool:
        """Whether `decide` would open a group now: only then the caller needs to know where sessions.v1 ends."""
        head = self.queue.peek()
        if head is None or free_slots < head.task.attempts:
            return False
        if self.weights.get(head.task.policy, PolicyWeights()).current is None:
            return False
        return head.task.purpose == "eval" or self.backlog.may_open()

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
        return [
            Placement(member, group, attempt, member not in self._known_members)
            for group in self.groups.values()
            for attempt, member in enumerate(group.members)
            if member not in group.verdicts
        ]

    def placed(self, session: str) -> None:
        """The session was handed to an actor; from now on it may have a history."""
        self._known_members.add(session)

    def recovered(self) -> None:
        """Start-up is over: members of groups folded so far may have been placed by a predecessor."""
        for group in self.groups.values():
            self._known_members.update(group.members)

    def _refuse(self, ref: RecordRef, reason: DiscardReason, detail: str) -> None:
        lane = self.lane.lane
        self._refusals.append(GroupDiscarded(group_id=group_id(ref), lane=lane, reason=reason, detail=detail, task=ref))

    def _open(self, now_ms: int, free_slots: int, sessions_floor: list[int]) -> list[GroupEvent]:
        opened: list[GroupEvent] = []
        backlog_before = self.backlog.open_groups
        while self.may_open(free_slots):
            head = self.queue.pop()
            task = head.task
            weights = self.weights[task.policy]
            version = weights.current
            assert version is not None
            pinned = task.policy_version if task.policy_version is not None or task.purpose == "rl" else version
            if pinned is not None and (pinned not in weights.published or pinned in weights.pruned):
                why = "was pruned" if pinned in weights.pruned else "does not exist"
                self._refuse(head.ref, "policy_version", f"version {pinned} of policy {task.policy} {why}")
                continue
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
            tasks_low=self.tasks_low(),
            idempotency_key=task.idempotency_key,
            budget=task.budget,
            labels=task.labels,
        )

    def tasks_low(self) -> list[int]:
        """By partition of tasks.v1: every record before this offset has been decided or was no task to decide."""
        if not self._task_position:
            return []
        low = [0] * (max(self._task_position) + 1)
        for partition, position in self._task_position.items():
            low[partition] = min(self._waiting_offsets.get(partition) or {position})
        return low

    def _decided(self, task: RecordRef) -> None:
        self._waiting_offsets.get(task.partition, set()).discard(task.offset)
