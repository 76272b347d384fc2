"""A session with a record that nobody can read ends all the same, with a reason, also when its host is down
(actors/reward/torn.py): a real session host, a real broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.crash_child import SessionHost
from support.holder import until
from support.lane_world import TURN_HEADERS, LaneWorld
from support.session_world import TOKENIZER

from odradek.actors.reward import torn
from odradek.actors.reward.torn import TornSessions
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session import actor as session_actor
from odradek.actors.session.ports import WorkspaceStart
from odradek.actors.session.runner import SessionSpec
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.meta import Meta, Origin
from odradek.streams.events.sessions import CancelRequested, SessionCompleted, SessionEvent, SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, event_log, kafka_config

__all__ = ["event_log", "kafka_config"]
pytestmark = pytest.mark.contract

GROUP = "torn-test"


def deployed(log: EventLog) -> Deployment:
    store = ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none")
    lane = LaneWorld(log).configuration()
    return Deployment(
        kafka=log.config, store=store, lane=lane, data_dir="", tokenizer_file=str(TOKENIZER), warm_start_dir=""
    )


async def a_torn_session(log: EventLog, origin: Origin = "rl") -> str:
    """Opened, then a record nobody can read, which a consumer has set aside."""
    name = str(uuid.uuid4())
    opened = SessionOpened(session_id=name, policy="p", group_id="g")
    await log.append("sessions.v1", name, an_event(opened, meta=Meta(origin=origin)))
    await tear(log, name)
    return name


async def tear(log: EventLog, name: str) -> None:
    ref = await log.append_raw("sessions.v1", name.encode(), b"\xc1", TURN_HEADERS)
    await DeadLetters(log).put(GROUP, await log.read_ref(ref), Why.DECODE, "it can't be read", 0)


async def story(log: EventLog, name: str) -> list[SessionEvent]:
    found = []
    async for record in log.read_key("sessions.v1", name, start=0):
        try:
            found.append(record.event.body)
        except UndecodableRecord:
            continue
    return found


@asynccontextmanager
async def hosted(deployment: Deployment, down: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[SessionHost]:
    """The one host of the deployment, gone while `down` is there."""
    host = SessionHost(deployment, down)
    patch.setattr(torn, "actor_handle", lambda _name, _namespace: host)
    handle: Callable[[str, str], object] = session_actor.actor_handle
    patch.setattr(session_actor, "actor_handle", handle)  # the host changes it; it is put back
    try:
        yield host
    finally:
        if host._actor is not None:
            await asyncio.to_thread(host._actor._loop.stop)


async def test_a_torn_session_whose_host_is_down_ends_with_the_reason_once_it_is_back(
    event_log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, person = await a_torn_session(event_log), await a_torn_session(event_log, "production")
    deployment, down = deployed(event_log), tmp_path / "down"
    down.touch()
    async with hosted(deployment, down, monkeypatch):
        sessions = TornSessions(event_log, deployment, GROUP)
        await sessions.round()
        assert [type(body) for body in await story(event_log, name)] == [SessionOpened]
        down.unlink()
        restarted = TornSessions(event_log, deployment, GROUP)

        async def ended() -> bool:
            await restarted.round()
            return any(isinstance(body, SessionCompleted) for body in await story(event_log, name))

        await until(ended)
        written = await story(event_log, name)
        await sessions.round()
        assert await story(event_log, name) == written, "it has ended: nothing more is asked"
    (end,) = [body for body in written if isinstance(body, SessionCompleted)]
    (cancel,) = [body for body in written if isinstance(body, CancelRequested)]
    assert (end.reason, end.group_id) == ("cancelled", "g")
    assert cancel.reason.startswith("a record of it can't be read: sessions.v1/")
    assert len(await story(event_log, person)) == 1, "a person's session is theirs to resume"


async def test_a_torn_session_that_runs_is_told_once_to_stop(
    event_log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, deployment = str(uuid.uuid4()), deployed(event_log)
    async with hosted(deployment, tmp_path / "down", monkeypatch) as host:
        opened = SessionOpened(session_id=name, policy="p", group_id="g")
        await host.ask("open", [SessionSpec(opened, "x", WorkspaceStart(image="", files={}))])

        async def begun() -> bool:
            return len(await story(event_log, name)) > 1

        await until(begun)
        await tear(event_log, name)
        sessions = TornSessions(event_log, deployment, GROUP)
        for _ in range(2):
            await sessions.round()
        cancels = [body for body in await story(event_log, name) if isinstance(body, CancelRequested)]
    assert len(cancels) == 1
