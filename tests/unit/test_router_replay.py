"""Router replay: the experts that sampled a token are logged with its turn, and it is trained through those."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from support.condense_world import Condenser, condensing
from support.session_world import FolderEnvironment, MemoryJournal, ScriptedModel, runner, spec, template, turn

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.types import SampleRequest
from odradek.actors.inference.weights import build
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy, Routing
from odradek.actors.session.ports import Completion
from odradek.actors.trainer.batch import TrainingBatch
from odradek.actors.trainer.optim import AdamW
from odradek.actors.trainer.step import StepSettings, replayed, score, train_step
from odradek.streams.assembly.v1.sequence import Segment, sequence_of

MOE = ModelConfig(hidden_size=32, num_hidden_layers=2, head_dim=8, num_experts=4, moe_intermediate_size=24)
T = template()
FILES = {name: f"{name} = {' + '.join(str(i * 37 % 101) for i in range(18))}\n" for name in "abcdefgh"}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def routed(tokens: Sequence[int], seed: int = 1) -> bytes:
    """What an engine that computes all of `tokens` under this policy reports."""
    routing = Routing()
    with torch.no_grad():
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        Policy(MOE, seed).forward_packed(torch.tensor(tokens), torch.arange(len(tokens)), starts, routing)
    return torch.stack(routing.chosen, 1).numpy().astype("<i2").tobytes()


def through_experts(said: Completion, context: list[int]) -> Completion:
    return dataclasses.replace(said, experts=routed([*context, *said.tokens[:-1]]))


class Sparse(ScriptedModel):
    async def sample(self, *, turn: int, tokens: list[int], **more: object) -> Completion:
        return through_experts(await super().sample(turn=turn, tokens=tokens, **more), tokens)


class SparseCondenser(Condenser):
    async def sample(self, *, tokens: list[int], **more: object) -> Completion:
        return through_experts(await super().sample(tokens=tokens, **more), tokens)  # type: ignore[arg-type]


def read(*paths: str) -> list[int]:
    return turn(T, *(("read_file", {"path": path}) for path in paths))


def batch_of(segments: Sequence[Segment], **changes: object) -> TrainingBatch:
    made = TrainingBatch(
        tokens=np.concatenate([np.array(s.tokens, np.int32) for s in segments]),
        positions=np.concatenate([np.arange(len(s), dtype=np.int32) for s in segments]),
        seq_starts=np.cumsum([0, *(len(s) for s in segments)]).astype(np.int32),
        loss_mask=np.concatenate([np.array(s.mask, np.bool_) for s in segments]),
        sampler_logprobs=np.concatenate([np.array(s.logprobs, np.float32) for s in segments]),
        advantages=np.ones(sum(map(len, segments)), np.float32),
        versions=np.concatenate([np.array(s.versions, np.int32) for s in segments]),
        experts=tuple(bytes(s.experts) for s in segments),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


async def test_turns_of_a_session_log_the_experts_of_every_token_once() -> None:
    journal = MemoryJournal()
    script = [read("a", "b"), read("c"), turn(T, done=True)]
    await runner(journal, Sparse(script), FolderEnvironment(), spec(FILES)).run()
    (segment,) = sequence_of("s", journal.history("s")).segments
    assert bytes(segment.experts) == routed(list(segment.tokens)[:-1])


async def test_a_condensed_context_logs_the_experts_of_each_of_its_segments() -> None:
    journal = MemoryJournal()
    script = [*(read(name) for name in "abcdefg"), turn(T, done=True)]
    await runner(journal, SparseCondenser(script), FolderEnvironment(), condensing(FILES, "model")).run()
    segments = sequence_of("s", journal.history("s")).segments
    assert len(segments) > 1
    for segment in segments:
        assert bytes(segment.experts) == routed(list(segment.tokens)[:-1])


async def segments_of_two_sessions() -> list[Segment]:
    segments = []
    for script in ([read("a"), turn(T, done=True)], [read("b", "c"), turn(T, done=True)]):
        journal = MemoryJournal()
        await runner(journal, Sparse(script), FolderEnvironment(), spec(FILES)).run()
        segments += sequence_of("s", journal.history("s")).segments
    return segments


async def test_training_goes_through_the_experts_that_sampled_whatever_the_router_would_choose_now() -> None:
    segments = await segments_of_two_sessions()
    batch = batch_of(segments)
    changed = Policy(MOE, seed=2)
    routing = replayed(MOE, batch)
    assert routing is not None
    tokens, positions = torch.from_numpy(batch.tokens).long(), torch.from_numpy(batch.positions).long()
    with torch.no_grad():
        changed.forward_packed(tokens, positions, torch.from_numpy(batch.seq_starts), routing)
    at = 0
    for segment in segments:
        here = torch.stack(routing.chosen, 1)[at : at + len(segment) - 1]
        assert here.numpy().astype("<i2").tobytes() == bytes(segment.experts)
        at += len(segment)
    assert routed(segments[0].tokens, seed=2) != routed(segments[0].tokens, seed=1)
    without = score(changed, dataclasses.replace(batch, experts=None))
    assert np.abs(score(changed, batch) - without)[batch.loss_mask].max() > 1e-3


async def test_replay_changes_no_bit_under_the_weights_that_sampled() -> None:
    batch = batch_of(await segments_of_two_sessions())
    own = score(Policy(MOE, 1), dataclasses.replace(batch, experts=None))
    assert np.array_equal(score(Policy(MOE, 1), batch), own)


async def test_the_router_learns_through_replayed_experts_and_the_setting_turns_replay_off() -> None:
    batch = batch_of(await segments_of_two_sessions())

    def router_after(settings: StepSettings, given: TrainingBatch) -> torch.Tensor:
        policy = Policy(MOE, 2)
        train_step(policy, AdamW(policy), given, settings, torch.Generator().manual_seed(0), step=9)
        return torch.stack([dict(policy.named_parameters())[f"blocks.{i}.router"].detach() for i in range(2)])

    before = torch.stack([dict(Policy(MOE, 2).named_parameters())[f"blocks.{i}.router"].detach() for i in range(2)])
    on, off = StepSettings(minibatches=1), StepSettings(minibatches=1, router_replay=False)
    assert not torch.equal(router_after(on, batch), before)
    assert torch.equal(router_after(off, batch), router_after(on, dataclasses.replace(batch, experts=None)))
    assert not torch.equal(router_after(off, batch), router_after(on, batch))


@pytest.mark.parametrize(
    "spoil",
    [lambda e: b"", lambda e: e[:-2], lambda e: e + e[:8], lambda e: b"\xff\x7f" + e[2:], lambda e: e[:-1]],
    ids=["unknown", "short", "long", "no such expert", "torn"],
)
async def test_routing_that_is_not_known_of_all_is_replayed_of_none(spoil: object) -> None:
    segments = await segments_of_two_sessions()
    logged = tuple(bytes(s.experts) for s in segments)
    batch = batch_of(segments, experts=(logged[0], spoil(logged[1])))  # type: ignore[operator]
    assert replayed(MOE, batch) is None
    assert np.isfinite(score(Policy(MOE, 1), batch)).all()


def test_a_dense_policy_replays_nothing() -> None:
    dense = msgspec.structs.replace(MOE, num_experts=0)
    batch = TrainingBatch(
        *(np.zeros(3, np.int32), np.arange(3, dtype=np.int32), np.array([0, 3], np.int32), np.zeros(3, np.bool_)),
        *(np.zeros(3, np.float32), np.zeros(3, np.float32), np.zeros(3, np.int32)),
        experts=(b"",),
    )
    assert replayed(dense, batch) is None


def test_the_engine_reports_the_experts_of_every_computed_token() -> None:
    """Through a second turn that finds its context cached."""
    policy = Policy(MOE, 1)
    engine = Engine(MOE, "test")
    engine.install(build(MOE, 0, to_hf_state(policy)))
    context = T.open("fix it")
    for number in range(2):
        engine.add(
            SampleRequest(
                request_id=str(number),
                session_id="s",
                epoch=0,
                prompt_tokens=context,
                max_new_tokens=70,
                stop_ids=frozenset(),
                temperature=1.0,
                seed=5,
                deadline=1e18,
            )
        )
        while not (finished := engine.step().finished):
            pass
        assert (finished[0].cached_tokens > 0) is (number == 1)
        context = [*context, *finished[0].tokens]
        assert finished[0].experts == routed(context[:-1])
        context += T.results(["ok"])
