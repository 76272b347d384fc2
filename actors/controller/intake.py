"""What of the task topics leads to a group: the task topic of the deployment and of each tenant, folded. Pure.

The tenant is the topic's, never the message's word: `tasks.v1.TENANT` is TENANT's, and keys, ids and cancellations of
one tenant mean nothing to another's. Promises:
- a task record leads to at most one group; the same idempotency key (or, without one, task id) of a tenant twice is
  one task. A second one with other content (`Content`) is refused, naming both; with equal content it is dropped;
- a cancellation holds for what was published before it: what lies before it in its partition and, as nothing orders
  partitions, what others hold of the id. What lies behind it in its partition is a new task;
- a cancelled task without a group uses up no key, as a refused one does not. One with a group keeps its key, and a
  repetition that comes later is refused: nobody waits for it in silence;
- a task that can't be run, and RL on a task that anybody published for evaluation, are refused with the reason; a
  refused task uses up no key, so that its author can mend it and publish it again;
- `low` names offsets below which everything is decided, and what was refused is told: a successor that begins there
  misses nothing.

tests/unit/test_controller_intake.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from odradek.actors.controller.admission import TaskQueue, WaitingTask
from odradek.actors.controller.identity import task_digest
from odradek.actors.tasks.refusal import refusal
from odradek.streams import topics
from odradek.streams.events.groups import DiscardReason, GroupOpened
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import Budget, TaskCancelled, TaskEvent, TaskPublished

OWN = ""
"""The tenant of the deployment's own topic."""


def tenant_of(task: RecordRef) -> str:
    """Whose task this is."""
    return topics.tenant_of(task.topic) or OWN


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that will get no group, and why."""

    ref: RecordRef
    reason: DiscardReason
    detail: str


@dataclass(frozen=True, slots=True)
class Content:
    """Two tasks of one key with this in common are the same. A group.opened says it too: a successor compares alike."""

    task_id: str
    task_digest: str
    purpose: Literal["rl", "eval"]
    attempts: int
    budget: Budget


@dataclass(slots=True)
class Taken:
    """The task that has a key."""

    ref: RecordRef
    content: Content
    ended: str = ""
    """Why its group was sealed or discarded."""


@dataclass(slots=True)
class Decided:
    """What is known of tasks that are decided; a fold of groups.v1, as long as no task is waiting. It grows with the
    tasks of a deployment (about a kilobyte each): a key means its task for ever."""

    keys: dict[tuple[str, str], Taken] = field(default_factory=dict)
    """By tenant and key."""
    records: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    """By topic and partition the offsets that have their group, or their refusal, on the log."""
    eval_digests: set[str] = field(default_factory=set)


class Intake:
    """Idempotent for records already seen."""

    def __init__(self, policy: str, max_attempts: int) -> None:
        self.queue = TaskQueue()
        self.refused: list[Refused] = []
        """To be told, then cleared, by the caller."""
        self._policy = policy
        self._max_attempts = max_attempts
        self._position: dict[tuple[str, int], int] = {}
        self._waiting: dict[tuple[str, int], set[int]] = {}
        self.decided = Decided()
        self._cancelled: dict[tuple[str, str], dict[int, int]] = {}
        """By tenant and task id, then by partition, the last cancellation's offset."""

    # -- records -----------------------------------------------------------------------------------------------

    def on_task(self, ref: RecordRef, event: TaskEvent, *, again: bool = False) -> None:
        """A record of a task topic. `again`: one that was passed over before, and that a person has let go."""
        place = (ref.topic, ref.partition)
        if not again:
            if ref.offset < self._position.get(place, 0):
                return
            self._position[place] = ref.offset + 1
        tenant = tenant_of(ref)
        if isinstance(event, TaskCancelled):
            self._cancel(tenant, ref, event.task_id)
            return
        if ref.offset in self.decided.records.get(place, ()) or self.undecided(ref):
            return
        wrong = refusal(event, self._max_attempts) or self._unserved(event)
        if wrong is not None:
            self._refuse(ref, "refused", f"task {event.task_id[:80]}: {wrong}")
            return
        cancellation = self._cancellation(ref, event.task_id)
        if cancellation is not None:
            detail = f"task {event.task_id} was cancelled at {cancellation}; to run it, publish it under another id"
            self._refuse(ref, "cancelled", detail)
            return
        digest = task_digest(event)
        key = (tenant, event.idempotency_key or event.task_id)
        content = Content(event.task_id, digest, event.purpose, event.attempts, event.budget)
        if key in self.decided.keys:
            self._repeated(ref, content, key)
            return
        if event.purpose == "eval":
            self.decided.eval_digests.add(digest)
        elif digest in self.decided.eval_digests:
            self._refuse(ref, "refused", f"task {event.task_id} is published for evaluation; RL on it is refused")
            return
        self.decided.keys[key] = Taken(ref, content)
        self._waiting.setdefault(place, set()).add(ref.offset)
        self.queue.push(WaitingTask(ref, event, digest, tenant))

    def _unserved(self, task: TaskPublished) -> str | None:
        """A deployment serves one policy. A task for another would wait for ever, at the head of everybody's queue."""
        if task.policy == self._policy:
            return None
        return f"policy: {task.policy!r} is not served here, expected {self._policy!r}"

    def _cancel(self, tenant: str, ref: RecordRef, task_id: str) -> None:
        offsets = self._cancelled.setdefault((tenant, task_id), {})
        offsets[ref.partition] = max(ref.offset, offsets.get(ref.partition, 0))
        for waiting in self.queue.of(tenant, task_id):
            if self._cancellation(waiting.ref, task_id) is not None:
                self.queue.remove(waiting)
                self.turn_away(waiting, "cancelled", f"task {task_id} was cancelled at {ref}")

    def _cancellation(self, task: RecordRef, task_id: str) -> RecordRef | None:
        """The cancellation that holds for this record of a task, if any."""
        for partition, offset in self._cancelled.get((tenant_of(task), task_id), {}).items():
            if partition != task.partition or offset > task.offset:
                return RecordRef(task.topic, partition, offset)
        return None

    def _repeated(self, ref: RecordRef, content: Content, key: tuple[str, str]) -> None:
        """A second task with a key: the same again, or another one that would never run."""
        first = self.decided.keys[key]
        ours, theirs = asdict(content), asdict(first.content)
        other = [name for name in ours if ours[name] != theirs[name]]
        if other:
            wrong = f"has the key {key[1]!r} of the task at {first.ref} and another {', '.join(other)}"
        elif first.ended == "cancelled" or (not first.ended and self._cancellation(first.ref, content.task_id)):
            wrong = f"is the task at {first.ref} again, which was cancelled"
        else:
            return
        detail = f"task {content.task_id} at {ref} {wrong}; publish it under another idempotency key"
        self._refuse(ref, "refused", detail)

    def _refuse(self, ref: RecordRef, reason: DiscardReason, detail: str) -> None:
        """Undecided until this is on the log: a successor refuses it if this controller can't any more."""
        self._waiting.setdefault((ref.topic, ref.partition), set()).add(ref.offset)
        self.refused.append(Refused(ref, reason, detail))

    def turn_away(self, task: WaitingTask, reason: DiscardReason, detail: str) -> None:
        """A task taken from the queue that can't be opened after all."""
        self.decided.keys.pop((task.tenant, task.task.idempotency_key or task.task.task_id), None)
        self._refuse(task.ref, reason, detail)

    # -- what became of them -----------------------------------------------------------------------------------

    def opened(self, event: GroupOpened, *, served: bool) -> None:
        """A group was opened; `served` here, or by the controller of another policy."""
        if served:
            content = Content(event.task_id, event.task_digest, event.purpose, len(event.sessions), event.budget)
            self.decided.keys[_key_of(event)] = Taken(event.task, content)
        if event.purpose == "eval":
            self.decided.eval_digests.add(event.task_digest)
        self.settled(event.task)

    def closed(self, group: GroupOpened, reason: str) -> None:
        """A group that was served here has ended."""
        taken = self.decided.keys.get(_key_of(group))
        if taken is not None and taken.ref == group.task:
            taken.ended = reason

    def settled(self, task: RecordRef) -> None:
        """The record has its group, or its refusal, on the log."""
        place = (task.topic, task.partition)
        self.decided.records.setdefault(place, set()).add(task.offset)
        self._waiting.get(place, set()).discard(task.offset)

    def cancelled(self, group: GroupOpened) -> bool:
        """Whether the group's task was cancelled by its own tenant."""
        return self._cancellation(group.task, group.task_id) is not None

    def undecided(self, ref: RecordRef) -> bool:
        """Whether the record's task waits for its group, or its refusal for being on the log."""
        return ref.offset in self._waiting.get((ref.topic, ref.partition), ())

    def low(self, topic: str) -> list[int]:
        """By partition of a task topic: every record before this offset has been decided or was no task to decide."""
        positions = {partition: offset for (name, partition), offset in self._position.items() if name == topic}
        if not positions:
            return []
        low = [0] * (max(positions) + 1)
        for partition, position in positions.items():
            low[partition] = min(self._waiting.get((topic, partition)) or {position})
        return low

    def tenants_low(self) -> dict[str, list[int]]:
        """`low` of each tenant's topic that has been read."""
        names = sorted({name for name, _ in self._position if name != topics.TASKS.name})
        return {name: self.low(name) for name in names}


def _key_of(group: GroupOpened) -> tuple[str, str]:
    return tenant_of(group.task), group.idempotency_key or group.task_id
