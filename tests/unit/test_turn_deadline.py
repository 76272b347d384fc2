"""A turn's deadline between a session host and an engine whose clocks differ (actors/inference/serving.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from odradek.actors.inference.serving import ServingActor
from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.session import clients
from odradek.actors.session.clients import RayEngine

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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clients.time, "time", REAL_TIME)  # the engine's host shows the right time
            return await self._actor.sample(*arguments)


REAL_TIME = time.time


@pytest.mark.parametrize("wrong_by", [-HOUR_S, 0.0, HOUR_S])
async def test_a_turns_deadline_is_the_engines_own_clocks_whatever_its_callers_shows(
    wrong_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    monkeypatch.setattr(clients.time, "time", lambda: REAL_TIME() + wrong_by)
    before = REAL_TIME()
    with pytest.raises(clients.EngineUnavailable):
        await asyncio.wait_for(
            RayEngine([Handle(engine)]).sample(
                session_id="s",
                epoch=0,
                turn=0,
                tokens=[1],
                position_base=0,
                max_new_tokens=4,
                stop_ids=frozenset({0}),
                temperature=1.0,
                seed=1,
                priority=1,
                pinned_version=None,
                timeout_s=TIMEOUT_S,
            ),
            HOUR_S,
        )
    (deadline,) = engine.deadlines
    assert before + TIMEOUT_S <= deadline <= REAL_TIME() + TIMEOUT_S
