"""Who runs in the next step: admission, chunked prefill, priorities, preemption. No clock, no tensors.

Every step gives one token's work to each running request that is ready to sample, and spends a token budget on prompts,
in order of (priority, arrival).

Promises, each a test:
- Production before RL: requests are admitted and prefilled in order, and production that finds no seat or page takes
  those of the youngest RL request (test_production_first.py). Nobody overtakes the first waiting request, so a long
  prompt can't starve.
- Preemption by recomputation: when pages run out, the last request in order gives its pages back and waits again under
  its old place; its tokens stay, and sampling being a function of (seed, position), its continuation is the same.
- Progress: the first running request in order is never preempted, and any single request fits the pool (`add` refuses
  others), so each step computes something while anything waits. Hence requests of one priority finish in bounded work;
  RL under unending production is bounded by its deadline, which the engine enforces.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Final

from odradek.actors.inference.pages import PAGE_SIZE, Holding, PagePool, Spans
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import SampleRequest

ADMIT_HEADROOM: Final = 32
"""A request is admitted beside others only if 1/32 of the pool stays free for their growth. Too small a share: it is
preempted again at once; too large: pages lie idle."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine and all that it has sampled."""

    request: SampleRequest
    arrival: int
    version: int
    tokens: list[int]
    """Prompt and completion; the keys and values of the first `held.computed` are in pages."""
    held: Holding = field(default_factory=Holding)
    slot: int = -1
    """Its row of the engine's block table while running."""
    logprobs: list[float] = field(default_factory=list)
    weight_spans: Spans = field(default_factory=list)
    mixed: bool = False
    cached_tokens: int = -1
    """Reused at first admission; -1 before it."""
    added_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        return (self.request.priority, self.arrival)

    @property
    def pending(self) -> int:
        """Tokens whose keys and values are still to compute; 1 means ready to sample in the next step."""
        return len(self.tokens) - self.held.computed

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_tokens)


@dataclass(slots=True)
class StepPlan:
    """The work of one step; every sequence in it has the pages it needs."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)
    """(sequence, number of tokens to compute)"""
    admitted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Waiting and running requests over a page pool."""

    def __init__(
        self,
        pool: PagePool,
        settings: EngineSettings,
    ) -> None:
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Both in `order`."""
        self.preemptions = 0
        self._chunk = settings.chunk_tokens
        self._budget = settings.prefill_budget
        self._keep_old_kv = settings.kv_on_reload == "keep"
        self._slots = list(range(settings.max_running - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence, poisoned: bool = False) -> None:
        """The sequence leaves; its pages stay parked for its session's next turn unless their content is unsound."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        if poisoned:
            self.pool.poison(sequence.held)
        self._vacate(sequence)

    def restart(self, sequence: Sequence, version: int) -> None:
        """Sample on under other weights; keys and values of the old ones are computed again in the next steps."""
        sequence.version = version
        if sequence.slot >= 0:
            self.pool.release(sequence.held)
            sequence.held = self.pool.acquire(sequence.request.session_id, version, sequence.tokens)

    def plan(self) -> StepPlan:
        """Reserve pages, admit, and choose the step's work; may preempt."""
        for sequence in list(self.running):
            if sequence.slot >= 0:
                self._make_room(sequence)
        plan = StepPlan()
        while self.waiting and self._seat(self.waiting[0]):
            self._admit(plan)
        budget = self._budget
        for sequence in self.running:
            if sequence.pending == 1:
                plan.decode.append(sequence)
            elif budget > 0:
                count = min(sequence.pending, self._chunk, budget)
                plan.prefill.append((sequence, count))
                budget -= count
        return plan

    def _make_room(self, sequence: Sequence) -> None:
        """Pages for all its tokens, preempting from the end of the order; it may fall itself, the first never does."""
        while not self.pool.grow(sequence.held, len(sequence.tokens)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return

    def _seat(self, sequence: Sequence) -> bool:
        """Whether the first waiting request can start now; takes the place of running ones of lower priority."""
        while not self._fits(sequence):
            if not self.running or self.running[-1].request.priority <= sequence.request.priority:
                return False
            self._preempt(self.running[-1])
        return True

    def _fits(self, sequence: Sequence) -> bool:
        if not self._slots:
            return False
        needed = len(sequence.tokens) // PAGE_SIZE + 1
        headroom = self.pool.total // ADMIT_HEADROOM if self.running else 0
        return min(needed + headroom, self.pool.total) <= self.pool.available

    def _admit(self, plan: StepPlan) -> None:
        sequence = self.waiting.pop(0)
        sequence.slot = self._slots.pop()
        request = sequence.request
        keep_old = self._keep_old_kv and request.pinned_version is None
        sequence.held = self.pool.acquire(request.session_id, sequence.version, sequence.tokens, keep_old)
        sequence.mixed |= sequence.held.kv_spans != [(0, sequence.version)]
        if not self.pool.grow(sequence.held, len(sequence.tokens)):
            raise AssertionError(f"{request.request_id}: admitted without room, {self.pool.available} pages left")
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.held.computed
            plan.admitted.append(sequence)
        insort(self.running, sequence, key=lambda s: s.order)

    def _preempt(self, victim: Sequence) -> None:
        self._vacate(victim)
        self.preemptions += 1
        self.add(victim)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1
        self.pool.park(sequence.request.session_id, sequence.held, sequence.tokens)
        sequence.held = Holding()
