"""A session whose turns a real engine sampled, as a session actor writes it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.inference.weights import build
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.resample import Resampled, logged_turns, resampled
from odradek.actors.trainer.testing import TINY
from odradek.kernels.numerics import numerics_id
from odradek.streams.codec import f32, i32
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    ContextSummarized,
    SamplingParams,
    SessionOpened,
    TurnSampled,
    WeightSpan,
)
from odradek.streams.ownership import SessionRecord

SEED = 11
POLICIES = {version: Policy(TINY, seed=version) for version in (1, 2)}


class Sampled:
    """One session as a session actor writes it, its turns sampled by a real engine."""

    def __init__(self, temperature: float = 1.0) -> None:
        torch.set_num_threads(1)
        self.engine = Engine(TINY, numerics_id())
        self.load(1)
        self.sampling = SamplingParams(temperature=temperature, seed=SEED)
        self.records: list[SessionRecord] = []
        self.context: list[int] = []
        self.base = self.segment = 0
        self._write(SessionOpened(session_id="s", policy="p", sampling=self.sampling), Meta())

    def load(self, version: int) -> None:
        self.engine.install(build(TINY, version, to_hf_state(POLICIES[version])))

    def _write(self, body: SessionOpened | TurnSampled | ContextSummarized, meta: Meta | None = None) -> None:
        number = len(self.records)
        self.records.append((number, f"e{number}", meta or Meta(epoch=0, seq=number - 1), body))

    def turn(self, prompt: list[int], tokens: int, reload_after: int | None = None) -> SampleResult:
        """Sample `tokens`, and take up version 2 after some of them."""
        self.context += prompt
        request = SampleRequest(
            request_id=f"r{len(self.records)}",
            session_id="s",
            epoch=0,
            prompt_tokens=list(self.context),
            position_base=self.base,
            max_new_tokens=tokens,
            stop_ids=frozenset(),
            temperature=self.sampling.temperature,
            seed=SEED,
            deadline=1e18,
        )
        self.engine.add(request)
        steps = 0
        while not (done := self.engine.step().finished):
            steps += 1
            if steps == reload_after:
                self.load(2)
        (result,) = done
        turn = TurnSampled(
            turn=len([1 for *_, body in self.records if isinstance(body, TurnSampled)]),
            segment=self.segment,
            position=len(self.context) - len(prompt),
            prompt=i32(prompt),
            completion=i32(result.tokens),
            logprobs=f32(result.logprobs),
            spans=[WeightSpan(start, version) for start, version in result.weight_spans],
            numerics_id=result.numerics_id,
            finish_reason=result.finish_reason,
        )
        self.context += result.tokens
        self._write(turn)
        return result

    def condense(self, prompt: list[int]) -> None:
        self.base, self.segment, self.context = self.base + len(self.context), self.segment + 1, list(prompt)
        self._write(ContextSummarized(segment=self.segment, prompt=i32(prompt), cut_after_turn=0))

    def again(self, change: Callable[[TurnSampled], TurnSampled] | None = None, turn: int = 0) -> Resampled:
        """Computed again, after something was done to one turn's record."""
        records = [
            (
                offset,
                name,
                meta,
                change(body) if change and isinstance(body, TurnSampled) and body.turn == turn else body,
            )
            for offset, name, meta, body in self.records
        ]
        opened, turns = logged_turns(records)
        return resampled("s", opened, turns, POLICIES)
