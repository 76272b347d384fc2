"""Which waiting task is opened next, and whether now is the time. Pure.

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
    """Waiting tasks: evaluation before RL, then priority, then arrival."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, waiting: WaitingTask) -> None:
        self._arrivals += 1
        purpose = 0 if waiting.task.purpose == "eval" else 1
        rank = (purpose, -waiting.task.priority, self._arrivals, waiting.ref.offset)
        heapq.heappush(self._heap, _Entry(rank, waiting))

    def peek(self) -> WaitingTask | None:
        return self._heap[0].waiting if self._heap else None

    def pop(self) -> WaitingTask:
        return heapq.heappop(self._heap).waiting

    def remove(self, task_id: str) -> list[WaitingTask]:
        """Take a cancelled task out; returns what was removed."""
        gone = [entry.waiting for entry in self._heap if entry.waiting.task.task_id == task_id]
        self._heap = [entry for entry in self._heap if entry.waiting.task.task_id != task_id]
        heapq.heapify(self._heap)
        return gone
