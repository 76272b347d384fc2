"""A turn between a session host and its engines: whose clock its deadline is, and which of them is asked.

actors/inference/serving.py, actors/session/clients.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest
import ray.exceptions
from support.waiting import eventually

from odradek.actors.inference.errors import ContextTooLongError, DeadlineExceededError, EngineCrashedError
from odradek.actors.inference.serving import ServingActor
from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.session import clients
from odradek.actors.session.clients import RayEngine
from odradek.actors.session.errors import EngineUnavailable, SessionInfraFailure
from odradek.actors.session.ports import Completion

HOUR_S = 3_600.0
TIMEOUT_S = 30.0


class Engine:
    """Notes what it is asked, and answers nothing: the turn itself is no matter here."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []

    async def sample(self, request: SampleRequest) -> SampleResult:
        self.deadlines.append(request.deadline)
        raise TimeoutError


class OwnLoop:
    async def call(self, work: Coroutine[Any, Any, SampleResult]) -> SampleResult:
        return await work


class Handle:
    """Ray's handle of a real `ServingActor.sample`, in this process."""

    def __init__(self, engine: Engine) -> None:
        self._actor = object.__new__(ServingActor)
        self._actor._loop, self._actor._engine = OwnLoop(), engine  # type: ignore[assignment]

    @property
    def sample(self) -> Handle:
        return self

    async def remote(self, *arguments: Any) -> SampleResult:
        return await self._actor.sample(*arguments)


class Cancelled:
    """The handle of a replica's `cancel`."""

    def __init__(self) -> None:
        self.sessions: list[tuple[str, int]] = []

    def remote(self, session_id: str, epoch: int) -> None:
        self.sessions.append((session_id, epoch))


class Replica:
    """Another handle: raises what it is told to, and answers otherwise."""

    def __init__(self) -> None:
        self.asked = 0
        self.fault: Exception | None = None
        self.silent = False

        self.cancelled = Cancelled()

    @property
    def sample(self) -> Replica:
        return self

    @property
    def cancel(self) -> Cancelled:
        return self.cancelled

    async def remote(self, request: SampleRequest, _timeout_s: float) -> SampleResult:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        if self.silent:
            await asyncio.Future()
        return SampleResult(
            request_id=request.request_id, session_id=request.session_id, epoch=request.epoch, tokens=[0],
            logprobs=[0.0], weight_spans=[(0, 0)], numerics_id="n", finish_reason="stop", cached_tokens=0,
            queue_seconds=0.0, prefill_seconds=0.0, decode_seconds=0.0,
        )  # fmt: skip


def ask(engine: RayEngine) -> Coroutine[Any, Any, Completion]:
    return engine.sample(
        session_id="s", epoch=0, turn=0, tokens=[1], position_base=0, max_new_tokens=4, stop_ids=frozenset({0}),
        temperature=1.0, seed=1, priority=1, pinned_version=None, timeout_s=TIMEOUT_S,
    )  # fmt: skip


@pytest.mark.parametrize("wrong_by", [-HOUR_S, 0.0, HOUR_S])
async def test_a_turns_deadline_is_by_a_clock_that_nobody_sets(
    wrong_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, real = Engine(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + wrong_by)
    before = time.monotonic()
    with pytest.raises(EngineUnavailable):
        await ask(RayEngine([Handle(engine)]))
    (deadline,) = engine.deadlines
    assert before + TIMEOUT_S <= deadline <= time.monotonic() + TIMEOUT_S


@pytest.mark.parametrize("fault", [ray.exceptions.ActorUnavailableError("gone", None), EngineCrashedError("crashed")])
async def test_a_session_whose_engine_failed_asks_another_one_and_comes_back(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that is down or sick must not hold up half of all sessions while another one is idle."""
    replicas = [Replica(), Replica()]
    engine = RayEngine(replicas)
    await ask(engine)
    (own,) = [one for one in replicas if one.asked]
    (other,) = [one for one in replicas if not one.asked]
    own.fault = fault
    with pytest.raises(EngineUnavailable):
        await ask(engine)
    await ask(engine)
    assert (own.asked, other.asked) == (2, 1)
    own.fault = None
    monkeypatch.setattr(clients, "AVOIDED_S", 0.0)
    await ask(engine)
    assert (own.asked, other.asked) == (3, 1)


async def test_where_every_engine_failed_a_session_asks_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [Replica(), Replica()]
    engine = RayEngine(replicas)
    for one in replicas:
        one.fault = EngineCrashedError("crashed")
    for _ in range(4):
        with pytest.raises(EngineUnavailable):
            await ask(engine)
    assert sorted(one.asked for one in replicas) == [1, 3]


async def test_an_engine_that_was_too_busy_is_not_passed_over() -> None:
    """Its sessions would take its load to the next one, and what it had cached of them would be lost."""
    replicas = [Replica(), Replica()]
    for one in replicas:
        one.fault = DeadlineExceededError("late")
    engine = RayEngine(replicas)
    for _ in range(3):
        with pytest.raises(EngineUnavailable):
            await ask(engine)
    assert sorted(one.asked for one in replicas) == [0, 3]


async def test_a_request_that_can_never_be_accepted_ends_the_session_at_once() -> None:
    """Asked again it would fail again: nobody waits two minutes for that."""
    replica = Replica()
    replica.fault = ContextTooLongError("5 tokens, the model holds 4")
    with pytest.raises(SessionInfraFailure, match="5 tokens, the model holds 4"):
        await ask(RayEngine([replica]))


async def test_an_engine_is_told_of_a_turn_that_nobody_waits_for_any_more() -> None:
    replica = Replica()
    replica.silent = True
    turn = asyncio.create_task(ask(RayEngine([replica])))
    await eventually(lambda: replica.asked, "the request")
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert replica.cancelled.sessions == [("s", 0)]
