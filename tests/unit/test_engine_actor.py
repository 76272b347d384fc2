"""The actor: every wait ends, retries join, weights swap beside running requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping

import msgspec
import pytest
import torch
from support.small_model import CONFIG
from torch import Tensor

from odradek.actors.inference import actor as actor_module
from odradek.actors.inference import errors
from odradek.actors.inference.actor import InferenceActor
from odradek.actors.inference.engine import Engine, StepOutput
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import SampleRequest
from odradek.actors.inference.weights import FetchedWeights, state_digest
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy

STATES = {v: to_hf_state(Policy(CONFIG, seed=v)) for v in range(1, 8)}
States = Mapping[int, Mapping[str, Tensor]]


def loader(version: int, held: States) -> FetchedWeights:
    if version not in STATES:
        raise FileNotFoundError(f"no manifest of version {version}")
    return FetchedWeights(version, STATES[version], state_digest(STATES[version]))


def req(name: str = "r", n: int = 10, seconds: float = 60, **changes: object) -> SampleRequest:
    request = SampleRequest(
        request_id=name,
        session_id=name,
        epoch=1,
        prompt_tokens=[(i * 31 + 5) % 97 for i in range(150)],
        max_new_tokens=n,
        stop_ids=frozenset(),
        seed=11,
        deadline=time.monotonic() + seconds,
    )
    return msgspec.structs.replace(request, **changes)


@pytest.fixture
async def actor() -> AsyncIterator[InferenceActor]:
    actor = InferenceActor(CONFIG, loader, settings=EngineSettings(max_running=4))
    assert await actor.on_weights(1)
    yield actor
    await actor.stop()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine waits inside its next steps until the event is set."""
    event = threading.Event()
    step = Engine.step

    def gated(self: Engine) -> StepOutput:
        event.wait(30)
        return step(self)

    monkeypatch.setattr(Engine, "step", gated)
    return event


async def test_many_requests_are_sampled_together(actor: InferenceActor) -> None:
    results = await asyncio.gather(*(actor.sample(req(f"s{i}")) for i in range(9)))
    assert [r.request_id for r in results] == [f"s{i}" for i in range(9)]
    assert len({tuple(r.tokens) for r in results}) == 1  # one seed, one prompt: one answer
    stats, state = await actor.stats(), await actor.state()
    assert (stats.finished, stats.running) == (9, 0)
    assert (state.version, state.healthy, state.detail) == (1, True, "")
    assert state.numerics_id == results[0].numerics_id != ""


async def test_errors_of_a_request_reach_its_caller_alone(actor: InferenceActor) -> None:
    good, bad = await asyncio.gather(
        actor.sample(req("good")), actor.sample(req("bad", prompt_tokens=[])), return_exceptions=True
    )
    assert isinstance(bad, errors.InvalidRequestError) and not isinstance(good, BaseException)


async def test_asking_again_while_it_runs_joins_the_request(actor: InferenceActor, gate: threading.Event) -> None:
    """A retry after a lost reply must not sample a second time, nor end the first one's wait when it gives up."""
    first = asyncio.create_task(actor.sample(req()))
    second = asyncio.create_task(actor.sample(req(seconds=50)))
    await asyncio.sleep(0)
    with pytest.raises(errors.DuplicateRequestError, match="other arguments"):
        await actor.sample(req(n=11))
    second.cancel()
    gate.set()
    assert len((await first).tokens) == 10
    assert (await actor.stats()).finished == 1


async def test_a_caller_that_goes_away_frees_its_seat(actor: InferenceActor, gate: threading.Event) -> None:
    task = asyncio.create_task(actor.sample(req(n=100)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    again = asyncio.create_task(actor.sample(req(n=5)))  # the same id at once: not the old one's answer
    gate.set()
    result = await again
    assert (len(result.tokens), result.finish_reason) == (5, "length")
    stats = await actor.stats()
    assert (stats.running, stats.finished) == (0, 2)


async def test_a_newer_owner_cancels_and_fences_the_older(actor: InferenceActor, gate: threading.Event) -> None:
    old = asyncio.create_task(actor.sample(req(n=100, epoch=5)))
    await asyncio.sleep(0)
    new = asyncio.create_task(actor.sample(req(n=5, epoch=6)))
    gate.set()
    assert (await old).finish_reason == "cancelled"
    assert len((await new).tokens) == 5
    with pytest.raises(errors.StaleEpochError):
        await actor.sample(req(epoch=5))
    await actor.cancel("r", 7)
    with pytest.raises(errors.StaleEpochError):
        await actor.cancel("r", 6)


async def test_an_expired_request_fails_with_the_engines_own_error(actor: InferenceActor) -> None:
    with pytest.raises(errors.DeadlineExceededError, match="still waiting"):
        await actor.sample(req(seconds=-1))


async def test_a_stuck_engine_does_not_hold_its_callers(
    actor: InferenceActor, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "REPLY_GRACE", 0.05)
    with pytest.raises(errors.DeadlineExceededError, match="is the engine stuck"):
        await actor.sample(req(seconds=0.05))
    gate.set()


async def test_a_crash_fails_every_request_as_retryable_and_later_ones_at_once(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed: list[BaseException] = []
    actor = InferenceActor(CONFIG, loader, on_crash=crashed.append)
    await actor.on_weights(1)
    tasks = [asyncio.create_task(actor.sample(req(f"s{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    monkeypatch.setattr(Engine, "_compute", lambda *_: (_ for _ in ()).throw(MemoryError("no page")))
    gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(o) for o in outcomes] == [errors.EngineCrashedError] * 3
    with pytest.raises(errors.EngineCrashedError, match="MemoryError: no page"):
        await actor.sample(req("later"))
    state = await actor.state()
    assert not state.healthy and "MemoryError" in state.detail
    await actor.stop()
    assert [type(e) for e in crashed] == [MemoryError]


async def test_stop_fails_what_is_in_flight_as_retryable(actor: InferenceActor, gate: threading.Event) -> None:
    task = asyncio.create_task(actor.sample(req(n=100)))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(actor.stop())
    await asyncio.sleep(0.05)
    gate.set()
    await stopping
    with pytest.raises(errors.EngineStoppedError):
        await task


# -- weights --------------------------------------------------------------------------------------------------------


async def test_a_reload_under_load_fails_nobody_and_shows_in_the_spans(actor: InferenceActor) -> None:
    tasks = [asyncio.create_task(actor.sample(req(f"s{i}", n=150))) for i in range(6)]
    await actor.stats()  # all six were posted before: four run and two wait
    assert await actor.on_weights(2)
    results = await asyncio.gather(*tasks)
    assert all(len(r.tokens) == 150 for r in results)
    assert {tuple(v for _, v in r.weight_spans) for r in results} <= {(1,), (1, 2), (2,)}
    assert results[5].weight_spans[-1][1] == 2
    assert (await actor.state()).version == 2


async def test_weights_that_cannot_be_fetched_leave_the_served_version(actor: InferenceActor) -> None:
    with pytest.raises(FileNotFoundError, match="no manifest of version 99"):
        await actor.on_weights(99)
    state = await actor.state()
    assert (state.version, state.healthy) == (1, True)
    assert "weights 99 not loaded: FileNotFoundError" in state.detail
    assert (await actor.sample(req())).weight_spans == [(0, 1)]
    assert await actor.on_weights(2)
    assert (await actor.state()).detail == ""


async def test_a_loader_that_brings_another_version_is_refused(actor: InferenceActor) -> None:
    with pytest.raises(errors.WeightsRefusedError, match="asked for weights 2, the loader brought 3"):
        await actor.on_weights(2, lambda version, held: FetchedWeights(3, STATES[3]))


async def test_of_versions_announced_during_a_load_only_the_newest_is_loaded_next(actor: InferenceActor) -> None:
    started, go_on, asked = threading.Event(), threading.Event(), []

    def slow(version: int, held: States) -> FetchedWeights:
        asked.append(version)
        started.set()
        go_on.wait(30)
        return loader(version, held)

    first = asyncio.create_task(actor.on_weights(2, slow))
    await asyncio.to_thread(started.wait, 30)
    rest = [asyncio.create_task(actor.on_weights(v, slow)) for v in (3, 4, 5)]
    await asyncio.sleep(0)
    go_on.set()
    assert await first
    assert await asyncio.gather(*rest) == [False, False, True]
    assert asked == [2, 5]
    assert (await actor.state()).version == 5


async def test_a_loader_is_handed_the_held_states_so_that_it_can_apply_a_delta(actor: InferenceActor) -> None:
    def delta(version: int, held: States) -> FetchedWeights:
        changed = dict(held[1])
        changed["model.norm.weight"] = STATES[2]["model.norm.weight"]
        return FetchedWeights(version, changed)

    assert await actor.on_weights(2, delta)
    assert (await actor.sample(req())).weight_spans == [(0, 2)]


async def test_a_pinned_request_fetches_its_version_and_the_current_one_stays(actor: InferenceActor) -> None:
    assert (await actor.sample(req("pinned", pinned_version=3))).weight_spans == [(0, 3)]
    assert (await actor.sample(req("free"))).weight_spans == [(0, 1)]
    with pytest.raises(FileNotFoundError):
        await actor.sample(req("gone", pinned_version=99))


async def test_fetched_pins_are_bounded(actor: InferenceActor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "PINNED_KEPT", 2)
    for version in (2, 3, 4, 5):
        assert (await actor.sample(req(f"s{version}", pinned_version=version))).weight_spans == [(0, version)]
    await actor.on_weights(6)
    await actor.on_weights(7)
    assert (await actor.stats()).versions == [4, 5, 6, 7]


async def test_the_engine_computes_on_one_thread(actor: InferenceActor) -> None:
    threads = await actor._command(lambda engine: torch.get_num_threads())
    assert threads == 1
