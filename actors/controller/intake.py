"""What of the task topics leads to a group: the task topic of the deployment and of each tenant, folded. Pure.

The tenant is the topic's, never the message's word: `tasks.v1.TENANT` is TENANT's, and keys, ids and cancellations of
one tenant mean nothing to another's. Promises:
- a task record leads to at most one group; the same idempotency key (or task id) of a tenant twice is one task;
- a task that can't be run, and RL on a task that anybody published for evaluation, are refused with the reason; a
  refused task uses up no key, so that its author can mend it and publish it again;
- `low` names offsets below which everything is decided: a successor that begins there misses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from odradek.actors.controller.admission import TaskQueue, WaitingTask
from odradek.actors.controller.identity import task_digest
from odradek.actors.tasks.refusal import refusal
from odradek.streams import topics
from odradek.streams.events.groups import DiscardReason, GroupOpened
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskCancelled, TaskEvent, TaskPublished

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
        self._settled: set[RecordRef] = set()
        self._keys: set[tuple[str, str]] = set()
        self._cancelled: set[tuple[str, str]] = set()
        self._eval_digests: set[str] = set()

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
            self._cancelled.add((tenant, event.task_id))
            self.queue.remove(tenant, event.task_id)
            return
        key = (tenant, event.idempotency_key or event.task_id)
        if ref in self._settled or (tenant, event.task_id) in self._cancelled or key in self._keys:
            return
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
        self._keys.add(key)
        self._waiting.setdefault(place, set()).add(ref.offset)
        self.queue.push(WaitingTask(ref, event, digest, tenant))

    def _unserved(self, task: TaskPublished) -> str | None:
        """A deployment serves one policy. A task for another would wait for ever, at the head of everybody's queue."""
        if task.policy == self._policy:
            return None
        return f"policy: {task.policy!r} is not served here, expected {self._policy!r}"

    def _refuse(self, ref: RecordRef, reason: DiscardReason, detail: str) -> None:
        self._settled.add(ref)
        self.refused.append(Refused(ref, reason, detail))

    def turn_away(self, task: WaitingTask, reason: DiscardReason, detail: str) -> None:
        """A task taken from the queue that can't be opened after all."""
        self._keys.discard((task.tenant, task.task.idempotency_key or task.task.task_id))
        self.settled(task.ref)
        self._refuse(task.ref, reason, detail)

    # -- what became of them -----------------------------------------------------------------------------------

    def opened(self, event: GroupOpened, *, served: bool) -> None:
        """A group was opened; `served` here, or by the controller of another policy."""
        if served:
            self._keys.add((tenant_of(event.task), event.idempotency_key or event.task_id))
        if event.purpose == "eval":
            self._eval_digests.add(event.task_digest)
        self.settled(event.task)

    def settled(self, task: RecordRef) -> None:
        """The record has its group, or its refusal, on the log."""
        self._settled.add(task)
        self._waiting.get((task.topic, task.partition), set()).discard(task.offset)

    def cancelled(self, group: GroupOpened) -> bool:
        """Whether the group's task was cancelled by its own tenant."""
        return (tenant_of(group.task), group.task_id) in self._cancelled

    def undecided(self, ref: RecordRef) -> bool:
        """Whether the record's task waits for its group, or its refusal for being told."""
        waiting = self._waiting.get((ref.topic, ref.partition), ())
        return ref.offset in waiting or any(one.ref == ref for one in self.refused)

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
