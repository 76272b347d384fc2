"""Production is never starved of the log, of the object store, or of a session host (streams/priority.py,
actors/session/actor.py, actors/reward/feedback.py): a real broker and store, and rollouts that hold what there is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.session_world import TOKENIZER, spec, template, turn
from support.waiting import eventually

from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.reward.actor import RewardActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session import actor as session_actor
from odradek.actors.session.actor import SessionActor
from odradek.infra.serve.answers import give_feedback
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, Usage
from odradek.streams.log import READERS, EventLog
from odradek.streams.priority import serving
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

ROLLOUTS = 120
"""More than the controller admits by default."""


@pytest.fixture
def deployment(fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path) -> Deployment:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    return Deployment(
        kafka=fresh_config,
        store=ObjectStoreAddress(
            endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(keys)
        ),
        lane=LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1),
        data_dir=str(tmp_path),
        tokenizer_file=str(TOKENIZER),
        warm_start_dir="",
        max_commands=1,
    )


class Engine:
    """Answers people; rollouts wait for ever."""

    def __init__(self) -> None:
        self.sample = SimpleNamespace(remote=self._sample)
        self.asked = 0

    async def _sample(self, request: SampleRequest, _timeout_s: float) -> SampleResult:
        self.asked += 1
        if not request.session_id.startswith("person"):
            await asyncio.Event().wait()
        tokens = turn(template(), done=True)
        return SampleResult(
            request_id=request.request_id,
            session_id=request.session_id,
            epoch=request.epoch,
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            weight_spans=[(0, 3)],
            numerics_id="test",
            finish_reason="stop",
            cached_tokens=0,
        )


@pytest.fixture
async def host(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SessionActor, Engine]]:
    engine = Engine()
    monkeypatch.setattr(session_actor, "actor_handle", lambda _name, _namespace: engine)
    actor = await asyncio.to_thread(SessionActor, deployment, "session-0")
    yield actor, engine
    await asyncio.to_thread(actor._loop.stop)


async def test_a_person_is_served_by_a_host_full_of_rollouts_that_hold_every_reader(
    host: tuple[SessionActor, Engine], fresh_config: KafkaConfig
) -> None:
    """The person's session has a history that the host has to read first."""
    actor, engine = host

    def given(name: str, **changes: Any) -> Any:
        base = spec()
        return replace(base, opened=SessionOpened(session_id=name, policy="p", group_id="g"), **changes)

    await actor.open([given(f"rollout-{number}") for number in range(ROLLOUTS)])
    await eventually(lambda: engine.asked == ROLLOUTS, "all rollouts to wait for the engine")

    async def hold(release: asyncio.Event, held: asyncio.Semaphore) -> None:
        async with AsyncExitStack() as stack:
            for _ in range(READERS):
                await stack.enter_async_context(actor._log._reader())
                held.release()
            await release.wait()

    async with EventLog(fresh_config) as log:
        opened = SessionOpened(session_id="person", policy="p")
        first = await log.append("sessions.v1", "person", an_event(opened, meta=Meta(origin="production")))
        release, held = asyncio.Event(), asyncio.Semaphore(0)
        holding = asyncio.create_task(actor._loop.call(hold(release, held)))
        await eventually(lambda: held._value == READERS, "every reader to be held")
        person = given("person", origin="production", history_floor=first.offset)
        await actor.open([replace(person, opened=SessionOpened(session_id="person", policy="p"))])

        async def ended() -> list[str]:
            bodies = [record.event.body async for record in log.read_key("sessions.v1", "person", start=first.offset)]
            return [body.reason for body in bodies if isinstance(body, SessionCompleted)]

        assert await eventually(ended, "the person's session to end") == ["done"]
        assert len((await actor.status()).active) == ROLLOUTS, "no rollout had to go"
        actor._loop._loop.call_soon_threadsafe(release.set)
        await holding


async def test_an_answer_is_rewarded_while_gradings_hold_every_slot(deployment: Deployment) -> None:
    actor = await asyncio.to_thread(RewardActor, deployment, "reward-0")
    try:
        async with EventLog(deployment.kafka) as log:
            for _ in range(deployment.max_commands):
                await actor._loop.call(actor._slots.acquire())  # a grading that does not end
            assert actor._slots.locked()
            meta = Meta(origin="production", subject="ann")
            first = await log.append("sessions.v1", "s", an_event(SessionOpened(session_id="s", policy="p"), meta=meta))
            end = SessionCompleted(reason="done", first_offset=first.offset, usage=Usage())
            owner = Meta(origin="production", subject="ann", epoch=first.offset, seq=0)
            await log.append("sessions.v1", "s", an_event(end, meta=owner))
            await give_feedback(log, "s", "ann", "accepted")

            async def given() -> list[Any]:
                found = [r for n in await log.partitions("rewards.v1") async for r in log.read("rewards.v1", n, 0)]
                return [record.event.body for record in found]

            (reward,) = await eventually(given, "the answer's reward", 120.0)
            assert isinstance(reward, RewardAssigned) and reward.session_id == "s"
    finally:
        await actor.shut_down()
        await asyncio.to_thread(actor._loop.stop)


async def test_a_persons_objects_are_stored_while_rollouts_have_every_connection(
    s3_config: dict[str, str], s3_prefix: str
) -> None:
    store, never, key = S3Store(S3Config(**s3_config)), threading.Event(), f"{s3_prefix}first"
    rollouts = [store._threads.submit(never.wait) for _ in range(100)]
    try:
        with serving(True):
            assert await store.put_if_absent(key, b"x")
            assert await store.get(key) == b"x"
        assert not any(one.done() for one in rollouts)
    finally:
        never.set()
        store.close()
