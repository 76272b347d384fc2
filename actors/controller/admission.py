"""Which waiting task is opened next, and whether now is the time. Pure.

Tenants share by what they have under way (`Shares`). Production is no tenant's task: a person's session is handed
to its host by whoever serves that person, whatever runs there, and rollouts get what it leaves
(test_production_first.py).

The staleness bound at admission: a group opened now joins the batch that comes after everything already under way.
With o groups open, of which a share k is expected to be kept, m mixed groups sealed and not yet in a batch, and G
kept groups a batch, that batch lies ``pending + (o * k + m) / G`` steps after the current version, where `pending`
counts assembled batches not yet trained. Opening only while that number is below the bound keeps the oldest token of
a later batch within it in expectation; the assembler masks what exceeds it all the same (DESIGN §9).

Progress: with nothing open and nothing pending a group is opened whatever the number says, for then nothing under way
can lead to a batch (assembly may drop groups for reasons that admission does not know).

Guarantee 6 (tests/GUARANTEES.md): test_assembly_v1.py, test_controller_core.py, test_engine_actor.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskPublished

KEEP_RATE_FLOOR = 0.2
"""Lowest keep rate assumed. Too low opens far more groups than a batch needs when nearly all groups are flat
(stale work); too high starves the trainer then."""
KEEP_RATE_MEMORY = 40
"""Groups over which the keep rate is remembered. Too few: it jumps; too many: it lags behind the policy."""


@dataclass(frozen=True, slots=True)
class WaitingTask:
    """A published task that has no group yet."""

    ref: RecordRef
    task: TaskPublished
    digest: str
    tenant: str = ""


@dataclass(slots=True)
class Backlog:
    """What lies between an admission now and the step that will train it."""

    groups_per_batch: int
    max_staleness: int
    open_groups: int = 0
    sealed_groups: int = 0
    """Mixed, sealed, and not yet covered by an assembled batch."""
    pending_batches: int = 0
    """Assembled, and not yet trained."""
    kept: float = 1.0
    seen: float = 1.0

    def record_sealed(self, mixed: bool) -> None:
        """Remember whether a sealed group had a spread, with exponential forgetting."""
        fade = 1.0 - 1.0 / KEEP_RATE_MEMORY
        self.kept = self.kept * fade + mixed
        self.seen = self.seen * fade + 1.0

    @property
    def keep_rate(self) -> float:
        return max(KEEP_RATE_FLOOR, self.kept / self.seen)

    @property
    def expected_staleness(self) -> float:
        """Versions that a group opened now is expected to lie behind when it is trained."""
        waiting = self.open_groups * self.keep_rate + self.sealed_groups
        return self.pending_batches + waiting / self.groups_per_batch

    def may_open(self) -> bool:
        starving = self.open_groups == 0 and self.pending_batches == 0
        return starving or self.expected_staleness < self.max_staleness


@dataclass(order=True, slots=True)
class _Entry:
    rank: tuple[int, int, int, int]
    waiting: WaitingTask = field(compare=False)


class TaskQueue:
    """Waiting tasks. Of one tenant: evaluation before RL, then priority, then arrival. Between tenants: `next_of`."""

    def __init__(self) -> None:
        self._heaps: dict[str, list[_Entry]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def push(self, waiting: WaitingTask) -> None:
        self._arrivals += 1
        purpose = 0 if waiting.task.purpose == "eval" else 1
        rank = (purpose, -waiting.task.priority, self._arrivals, waiting.ref.offset)
        heapq.heappush(self._heaps.setdefault(waiting.tenant, []), _Entry(rank, waiting))

    def heads(self) -> list[WaitingTask]:
        """Each tenant's first task."""
        return [heap[0].waiting for heap in self._heaps.values()]

    def pop(self, tenant: str) -> WaitingTask:
        heap = self._heaps[tenant]
        waiting = heapq.heappop(heap).waiting
        if not heap:
            del self._heaps[tenant]
        return waiting

    def of(self, tenant: str, task_id: str) -> list[WaitingTask]:
        """A tenant's tasks of this id."""
        return [one.waiting for one in self._heaps.get(tenant, []) if one.waiting.task.task_id == task_id]

    def remove(self, waiting: WaitingTask) -> None:
        """Take a cancelled task out."""
        heap = [entry for entry in self._heaps.pop(waiting.tenant, []) if entry.waiting is not waiting]
        if heap:
            heapq.heapify(heap)
            self._heaps[waiting.tenant] = heap


@dataclass(slots=True)
class Shares:
    """What each tenant has under way, for fairness between them.

    The next task is the one of the tenant with the fewest sessions under way, among equals the one that was served
    longest ago. So with t tenants that always have tasks waiting, each holds about 1/t of the slots however many tasks
    the others publish; and a tenant with nothing under way is served before anybody gets a second group.

    Nobody starves: every group that another tenant gets raises that one's count or, if it ends at once, makes it the
    one that was served last. The chosen task waits for its slots and nobody overtakes it, so that a large group is not
    kept out by small ones for ever; a group ends at its deadline at the latest.
    """

    sessions: dict[str, int] = field(default_factory=dict)
    """By tenant the members of its open groups that have no verdict yet."""
    served: dict[str, int] = field(default_factory=dict)
    """By tenant when it was last served, as a count of openings."""

    def took(self, tenant: str, attempts: int, when: int) -> None:
        """A group of the tenant was opened."""
        self.sessions[tenant] = self.sessions.get(tenant, 0) + attempts
        self.served[tenant] = when

    def next_of(self, heads: Iterable[WaitingTask]) -> WaitingTask | None:
        """Of the tenants' first tasks the one to open next."""
        return min(
            heads,
            key=lambda head: (self.sessions.get(head.tenant, 0), self.served.get(head.tenant, -1), head.tenant),
            default=None,
        )
