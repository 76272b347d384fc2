"""DESIGN §1.7 and §7 on the engine: same numbers, same tokens, known policy, on random batches.

One Hypothesis scenario draws prompts, chunks, budgets, seats, pages (so few that requests are preempted), follow-up
turns, cancellations and a reload, and checks every result against the trainer's packed forward, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.small_model import CONFIG as DENSE

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import Priority, SampleRequest, SampleResult
from odradek.actors.inference.weights import build
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy
from odradek.kernels.logprob.api import token_logprobs

MOE = msgspec.structs.replace(DENSE, num_experts=4, moe_intermediate_size=24)
POLICIES = {(c.num_experts, v): Policy(c, seed=v) for c in (DENSE, MOE) for v in (1, 2)}
STOP = 96


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def packed_logprobs(policy: Policy, prompt: list[int], completion: list[int]) -> list[float]:
    """What the trainer computes for `completion` after `prompt`."""
    context = torch.tensor(prompt + completion)
    starts = torch.tensor([0, len(context)], dtype=torch.int32)
    with torch.inference_mode():
        hidden = policy.forward_packed(context, torch.arange(len(context)), starts)
        rows = hidden[len(prompt) - 1 : -1]
        logprob, _ = token_logprobs(rows, policy.head_weight, context[len(prompt) :])
    return [float(x) for x in logprob]


def assert_same_numbers(result: SampleResult, prompt: list[int], experts: int) -> None:
    if not result.tokens:
        assert (result.finish_reason, result.weight_spans) == ("cancelled", [])
        return
    ends = [start for start, _ in result.weight_spans[1:]] + [len(result.tokens)]
    for (start, version), end in zip(result.weight_spans, ends, strict=True):
        expected = packed_logprobs(POLICIES[experts, version], prompt, result.tokens)
        assert result.logprobs[start:end] == expected[start:end]


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    limit: int
    greedy: bool
    priority: int
    delay: int
    """Steps before it arrives."""


tokens = st.integers(0, STOP - 1)
turns = st.builds(
    Turn,
    prompt=st.integers(1, 190).flatmap(lambda n: st.lists(tokens, min_size=n, max_size=n)),
    limit=st.integers(1, 40),
    greedy=st.booleans(),
    priority=st.integers(0, 1),
    delay=st.integers(0, 12),
)


def request(name: str, prompt: list[int], turn: Turn, pinned: int | None = None) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        session_id=name.split("/")[0],
        epoch=0,
        prompt_tokens=prompt,
        max_new_tokens=turn.limit,
        stop_ids=frozenset({STOP}),
        temperature=0.0 if turn.greedy else 1.0,
        seed=hash(turn.limit),
        priority=Priority(turn.priority),
        pinned_version=pinned,
        deadline=1e18,
    )


def engine(config: ModelConfig, settings: EngineSettings) -> Engine:
    e = Engine(config, "test", settings, clock=lambda: 0.0)
    e.install(build(config, 1, to_hf_state(POLICIES[config.num_experts, 1])))
    return e


def alone(config: ModelConfig, version: int, prompt: list[int], turn: Turn) -> SampleResult:
    """The same request on a cold engine with nobody else."""
    e = engine(config, EngineSettings(max_running=1))
    e.install(build(config, version, to_hf_state(POLICIES[config.num_experts, version])))
    e.add(request("alone", prompt, turn))
    while True:
        if out := e.step().finished:
            return out[0]


@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a scenario takes seconds: shrinking one takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    batch=st.lists(turns, min_size=1, max_size=7),
    config=st.sampled_from([DENSE, MOE]),
    chunk=st.integers(1, 130),
    budget=st.integers(1, 260),
    seats=st.integers(1, 6),
    pages=st.integers(5, 16),
    reload_at=st.integers(0, 40),
    cancel_at=st.integers(0, 40),
    follow_up=st.lists(tokens, min_size=1, max_size=70),
)
def test_every_logprob_has_the_bits_of_the_packed_forward_whatever_the_schedule(
    batch: list[Turn],
    config: ModelConfig,
    chunk: int,
    budget: int,
    seats: int,
    pages: int,
    reload_at: int,
    cancel_at: int,
    follow_up: list[int],
) -> None:
    e = engine(
        config,
        EngineSettings(num_pages=pages + 1, max_running=seats, chunk_tokens=chunk, prefill_budget=budget),
    )
    prompts = {f"s{i}/0": t.prompt for i, t in enumerate(batch)}
    turn_of = dict(zip(prompts, batch, strict=True))
    waiting = dict(turn_of)
    done: dict[str, SampleResult] = {}
    step = 0
    while waiting or not e.idle:
        for name in [n for n, t in waiting.items() if t.delay <= step]:
            pinned = 1 if int(name[1]) % 3 == 2 else None
            e.add(request(name, prompts[name], waiting.pop(name), pinned))
        if step == reload_at:
            e.install(build(config, 2, to_hf_state(POLICIES[config.num_experts, 2])))
        if step == cancel_at:
            e.cancel("s0", 0)
        for result in e.step().finished:
            done[result.request_id] = result
            context = [*prompts[result.request_id], *result.tokens, *follow_up]
            if result.request_id.endswith("/0") and len(context) < 250:
                second = f"{result.session_id}/1"
                prompts[second], turn_of[second] = context, turn_of[result.request_id]
                waiting[second] = Turn(context, turn_of[second].limit, turn_of[second].greedy, 1, step)
        step += 1
        assert step < 5_000, "the engine does not finish"
    assert done.keys() == prompts.keys()
    assert e.stats().pages_used == 0
    for name, result in done.items():
        assert_same_numbers(result, prompts[name], config.num_experts)
        if int(name[1]) % 3 == 2:
            assert [v for _, v in result.weight_spans] == [1]
        if len(result.weight_spans) == 1:
            cold = alone(config, result.weight_spans[0][1], prompts[name], turn_of[name])
            n = len(result.tokens)
            assert n == len(cold.tokens) or result.finish_reason == "cancelled"
            assert (result.tokens, result.logprobs) == (cold.tokens[:n], cold.logprobs[:n])
            # After a reload or a cancellation the routing covers another stretch.
            assert result.experts == cold.experts or result.finish_reason == "cancelled"
