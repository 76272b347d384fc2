"""The sampling engine: continuous batching over a paged cache, as a pure core.

`add` and `cancel` change who waits and runs, `install` swaps weights, `step` does one round of work and returns who
finished. One thread calls all of them; the clock is handed in; nothing here knows Ray, Kafka or a socket.

Promises, each a test named after it:
- Same numbers: a sampled token's log-prob has the bits that the trainer's packed forward gives for it under the same
  weights and `numerics_id`, whatever ran beside it, however its prompt was chunked, cached, preempted or recomputed.
- Same tokens: a token is a function of (weights, prefix, seed, session position, temperature).
- Known policy: `weight_spans` names the version that sampled each token; a pinned request has one span.
- Reload between steps: running requests go on under the new weights, their keys and values computed again (or kept and
  marked `mixed` if the engine was told so); no request fails through a reload.
- Each request leaves exactly once: as a result, or as an error (deadline, cancelled by a newer owner, bad numbers).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from odradek.actors.inference.admission import check_request, room
from odradek.actors.inference.batch import PagedBatch, Work, parts_of
from odradek.actors.inference.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    InferenceError,
    NonFiniteLogitsError,
    StaleEpochError,
    WeightsRefusedError,
)
from odradek.actors.inference.pages import PAGE_SIZE, PagePool
from odradek.actors.inference.sampler import sample
from odradek.actors.inference.scheduler import Scheduler, Sequence
from odradek.actors.inference.settings import EngineSettings, context_of, pages_of
from odradek.actors.inference.types import MIXED_NUMERICS, EngineStats, FinishReason, SampleRequest, SampleResult
from odradek.actors.inference.weights import HeldWeights, WeightStore
from odradek.actors.policy.config import ModelConfig
from odradek.kernels.logprob.api import row_logits

FENCES_KEPT: Final = 100_000
"""Sessions whose newest epoch is remembered (about 100 bytes each). A zombie of a session forgotten here samples in
vain: the fold of the log ignores it all the same."""


@dataclass(slots=True)
class StepOutput:
    """Who left in this step, and whether anything was computed."""

    finished: list[SampleResult] = field(default_factory=list)
    failed: list[tuple[SampleRequest, InferenceError]] = field(default_factory=list)
    computed_tokens: int = 0


class Engine:
    """See the module. `numerics_id` names the circumstances under which this process computes."""

    def __init__(
        self,
        config: ModelConfig,
        numerics_id: str,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or EngineSettings()
        num_pages = pages_of(config, settings)
        max_running = settings.max_running
        self.config = config
        self.numerics_id = numerics_id
        self.weights = WeightStore(settings.keep_versions)
        self._pool = PagePool(num_pages)
        self._batch = PagedBatch(config, num_pages, max_running)
        self._context = context_of(config, settings)
        self._keep_old_kv = settings.kv_on_reload == "keep"
        self._scheduler = Scheduler(self._pool, settings)
        self._clock = clock
        self._by_id: dict[str, Sequence] = {}
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._arrivals = 0
        self._count: Counter[str] = Counter()
        self._busy = 0.0
        self._left = StepOutput()
        """Who left since the last step's return: cancellations between steps are reported by the next one."""

    # -- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: SampleRequest) -> None:
        """Queue a request; raises at once what makes it impossible, and fences older owners of its session."""
        check_request(request, self.config.vocab_size, self._context)
        version = self.weights.require_current()
        if request.pinned_version is not None:
            version = self.weights.get(request.pinned_version).version
        self._fence(request.session_id, request.epoch)
        self._cancel_older(request.session_id, request.epoch)
        if request.request_id in self._by_id:
            raise DuplicateRequestError(f"request {request.request_id} is already being sampled; wait for its result")
        sequence = Sequence(request, self._arrivals, version, list(request.prompt_tokens), added_at=self._clock())
        self._arrivals += 1
        self._by_id[request.request_id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, session_id: str, epoch: int) -> None:
        """Stop the session's requests of this and older epochs and refuse older ones from now on."""
        self._fence(session_id, epoch)
        self._cancel_older(session_id, epoch + 1)

    def withdraw(self, request_id: str) -> None:
        """Nobody waits for this request any more; unknown ids are fine (it may just have left)."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._leave(sequence, "cancelled")

    def forget(self, session_id: str) -> None:
        """The session is over: its parked pages may be taken by others first."""
        self._pool.forget(session_id)

    def _fence(self, session_id: str, epoch: int) -> None:
        newest = self._epochs.pop(session_id, epoch)
        self._epochs[session_id] = max(newest, epoch)
        if epoch < newest:
            raise StaleEpochError(f"session {session_id}: epoch {epoch} is over, {newest} owns it; stop acting for it")
        while len(self._epochs) > FENCES_KEPT:
            self._epochs.popitem(last=False)

    def _cancel_older(self, session_id: str, epoch: int) -> None:
        for s in [s for s in self._by_id.values() if s.request.session_id == session_id and s.request.epoch < epoch]:
            self._leave(s, "cancelled")

    # -- weights ----------------------------------------------------------------------------------------------------

    def install(self, weights: HeldWeights, *, current: bool = True) -> None:
        """Hold `weights` (from `weights.build`), and serve them to requests without a pin if `current`."""
        if weights.policy.config != self.config:
            raise WeightsRefusedError(f"weights {weights.version} are of another shape than this engine's model")
        before = self.weights.current
        self.weights.install(weights, current)
        if current and before is not None and before != weights.version:
            self._count["reloads"] += 1
            self._move_to(weights.version, before)
        self._prune()

    def unpin(self, version: int) -> None:
        """A version installed beside the current one may go once no request needs it."""
        self.weights.unpin(version)
        self._prune()

    def _prune(self) -> None:
        for version in self.weights.prune({s.version for s in self._by_id.values()}):
            self._pool.drop_version(version, parked=not self._keep_old_kv)

    def _move_to(self, version: int, before: int) -> None:
        for sequence in self._by_id.values():
            if sequence.request.pinned_version is not None:
                continue
            if self._keep_old_kv:
                if sequence.held.computed:
                    sequence.mixed = True
                sequence.version = version
            else:
                self._scheduler.restart(sequence, version)

    # -- the step ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing to compute and nobody to report: the next step would do nothing."""
        return not (self._by_id or self._left.finished or self._left.failed)

    def step(self) -> StepOutput:
        """One round: expire, plan, compute prompts and one token a ready row, sample, return who left."""
        begun = time.perf_counter()
        now = self._clock()
        for s in [s for s in self._by_id.values() if s.request.deadline <= now]:
            late = now - s.request.deadline
            where = f"{len(s.logprobs)} tokens sampled" if s.cached_tokens >= 0 else "still waiting"
            self._fail(s, DeadlineExceededError(f"request {s.request.request_id}: {late:.1f} s late, {where}"))
        plan = self._scheduler.plan()
        if self._pool.to_clear:
            self._batch.clear(self._pool.to_clear)
            self._pool.to_clear.clear()
        for s in plan.admitted:
            s.admitted_at = now
            self._count["prompt_tokens"] += s.prompt_length
            self._count["cached_tokens"] += s.cached_tokens
        work = [*((s, 1) for s in plan.decode), *plan.prefill]
        for version in {s.version for s, _ in work}:
            self._compute(version, [(s, n) for s, n in work if s.version == version])
        out = self.take_left()
        out.computed_tokens = sum(n for _, n in work)
        self._count["steps"] += 1
        self._count["prefill_tokens"] += sum(n for _, n in plan.prefill)
        self._busy += time.perf_counter() - begun
        return out

    def take_left(self) -> StepOutput:
        """Who left since the last call, without computing anything."""
        out, self._left = self._left, StepOutput()
        return out

    @torch.inference_mode()
    def _compute(self, version: int, work: Work) -> None:
        policy = self.weights.get(version).policy
        parts = parts_of(work)
        rows = [row for part in parts for row in part]
        last_B_H = self._batch.forward(policy, parts)
        for s, n in rows:
            self._advance(s, n)
        sampling = [i for i, (s, _) in enumerate(rows) if s.pending == 0]
        if sampling:
            last_N_H = last_B_H if len(sampling) == len(rows) else last_B_H[sampling]
            self._sample(version, [rows[i][0] for i in sampling], row_logits(last_N_H, policy.head_weight))

    def _advance(self, s: Sequence, count: int) -> None:
        before = s.held.computed
        s.held.computed = before + count
        if s.mixed:
            if s.held.kv_spans[-1][1] != s.version:
                s.held.kv_spans.append((before, s.version))
        elif s.held.computed // PAGE_SIZE > before // PAGE_SIZE:
            self._pool.seal(s.held, s.version, s.tokens)

    def _sample(self, version: int, ready: list[Sequence], logits_N_V: Tensor) -> None:
        requests = [s.request for s in ready]
        token_N, fit_N = sample(
            logits_N_V.numpy(),
            np.array([r.temperature for r in requests]),
            np.array([r.seed for r in requests], np.uint64),
            np.array([r.position_base + len(s.tokens) for r, s in zip(requests, ready, strict=True)], np.uint64),
        )
        logprob_N = torch.log_softmax(logits_N_V, -1).gather(1, torch.from_numpy(token_N)[:, None])[:, 0].tolist()
        now = self._clock()
        for s, token, fit, logprob in zip(ready, token_N.tolist(), fit_N.tolist(), logprob_N, strict=True):
            if fit:
                self._append(s, token, logprob, version, now)
            else:
                error = NonFiniteLogitsError(
                    f"request {s.request.request_id}: logits of position {len(s.tokens)} are not finite "
                    f"under weights {version}; roll back to a version that computes"
                )
                self._fail(s, error, poisoned=True)

    def _append(self, s: Sequence, token: int, logprob: float, version: int, now: float) -> None:
        if not s.logprobs:
            s.first_token_at = now
        if not s.weight_spans or s.weight_spans[-1][1] != version:
            s.weight_spans.append((len(s.logprobs), version))
        s.tokens.append(token)
        s.logprobs.append(logprob)
        self._count["sampled_tokens"] += 1
        if token in s.request.stop_ids:
            self._leave(s, "stop")
        elif len(s.logprobs) >= room(s.request, self._context):
            self._leave(s, "length")

    # -- leaving ----------------------------------------------------------------------------------------------------

    def _leave(self, s: Sequence, reason: FinishReason) -> None:
        now = self._clock()
        sampled, admitted = bool(s.logprobs), s.cached_tokens >= 0
        kv_spans = list(s.held.kv_spans) if s.mixed else []
        result = SampleResult(
            request_id=s.request.request_id,
            session_id=s.request.session_id,
            epoch=s.request.epoch,
            tokens=s.tokens[s.prompt_length :],
            logprobs=s.logprobs,
            weight_spans=s.weight_spans,
            finish_reason=reason,
            numerics_id=MIXED_NUMERICS if s.mixed else self.numerics_id,
            experts=self._batch.routed_experts(s),
            cached_tokens=max(s.cached_tokens, 0),
            kv_spans=kv_spans,
            queue_seconds=(s.admitted_at if admitted else now) - s.added_at,
            prefill_seconds=(s.first_token_at if sampled else now) - s.admitted_at if admitted else 0.0,
            decode_seconds=now - s.first_token_at if sampled else 0.0,
        )
        self._remove(s)
        self._count["finished"] += 1
        self._left.finished.append(result)

    def _fail(self, s: Sequence, error: InferenceError, poisoned: bool = False) -> None:
        self._remove(s, poisoned)
        self._count["failed"] += 1
        self._left.failed.append((s.request, error))

    def _remove(self, s: Sequence, poisoned: bool = False) -> None:
        del self._by_id[s.request.request_id]
        self._scheduler.finish(s, poisoned)

    def stats(self) -> EngineStats:
        count = self._count
        return EngineStats(
            version=self.weights.current,
            versions=self.weights.versions,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            pages_used=self._pool.in_use,
            pages_total=self._pool.total,
            parked_sessions=self._pool.parked_sessions,
            steps=count["steps"],
            prompt_tokens=count["prompt_tokens"],
            cached_tokens=count["cached_tokens"],
            prefill_tokens=count["prefill_tokens"],
            sampled_tokens=count["sampled_tokens"],
            preemptions=self._scheduler.preemptions,
            finished=count["finished"],
            failed=count["failed"],
            reloads=count["reloads"],
            busy_seconds=self._busy,
        )
