"""A release that is rolled back meets what a newer one wrote: it stands still there and says so, and skips nothing.

Each holder is the real one. What stands still on a topic of ours, and what goes on: streams/errors.py. The group
consumer has its own tests (test_consumer_group.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.assembly_world import turn
from support.holder import holder, told, until
from support.lane_world import LaneWorld

from odradek.actors.projections.actor import ProjectionsActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session import actor as session_actor
from odradek.actors.session.clients import KafkaJournal
from odradek.actors.session.ports import WorkspaceStart
from odradek.actors.session.runner import SessionSpec
from odradek.streams import topics
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetters
from odradek.streams.errors import UnknownEventType
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import SessionOpened
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.testing import an_event, event_log, fresh_config, kafka_config

__all__ = ["event_log", "fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract

NEWER = "made.up.v9"


async def newer(log: EventLog, topic: str, key: str) -> RecordRef:
    """What a newer release wrote."""
    return await log.append_raw(topic, key.encode(), b"\x80", [("ce_type", NEWER.encode())])


def told_of(ref: RecordRef) -> str:
    """Part of what is said: type, place and what to do."""
    return rf"'{NEWER}' is unknown to this build: upgrade readers .* at {ref}$"


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


@pytest.mark.parametrize("topic", [topics.GROUPS.name, topics.WEIGHTS.name])
async def test_a_controller_stands_down_at_what_a_newer_one_wrote_and_decides_nothing(
    log: EventLog, topic: str
) -> None:
    """Of its own decisions as of what others say; nor is it started again and again to meet it again."""
    lane = LaneWorld(log, lane="main-0")
    ref = await newer(log, topic, "main-0")
    task = TaskPublished(task_id="t", instruction="x", attempts=0)
    await log.append(topics.TASKS.name, "t", an_event(task))
    async with holder("controller", lane) as controller:

        async def down() -> bool:
            return bool(controller.state.get("fault"))

        await until(down)
        assert NEWER in controller.state["fault"] and controller.state["fault"].endswith(f" at {ref}")
        assert (controller.state["ready"], controller.starts) == (False, 1)
    assert await DeadLetters(log).letters(settled=True) == []
    written = [record.event.body async for record in log.read(topics.GROUPS.name, 0, 0) if record.ref != ref]
    assert [body for body in written if not isinstance(body, LaneConfigured)] == []


async def test_a_type_that_is_declared_foreign_is_passed_over(log: EventLog) -> None:
    """The way on where no release of the deployment's wrote it, or where it is given up."""
    await newer(log, topics.GROUPS.name, "main-0")
    foreign = EventLog(msgspec.structs.replace(log.config, foreign_types=(NEWER,)))
    async with foreign, holder("controller", LaneWorld(foreign, lane="main-0")) as controller:
        await told(controller, ready=True, fault="")
        assert len(await DeadLetters(log).letters()) == 1


@pytest.mark.parametrize("where", ["groups.v1", "batches.v1", "sessions.v1"])
async def test_an_assembler_ends_at_what_a_newer_one_wrote_and_batches_nothing(event_log: EventLog, where: str) -> None:
    """Of its lane, of its own batches (whose groups it would batch again) and in a session (whose batch a build that
    can read it could not make again)."""
    lane = LaneWorld(event_log, {"groups_per_batch": 1}, lane=f"t{uuid.uuid4().hex[:6]}-{PARTITION[where]}")
    await lane.configure()
    session = await lane.session(f"{lane.lane}.s", [turn(0, 0, [1], [2, 3], [(0, 0)])])
    ref = await newer(event_log, where, session.session_id if where == "sessions.v1" else lane.lane)
    if where == "sessions.v1":
        session = replace(session, last=ref.offset)
    other = await lane.session(f"{lane.lane}.o", [turn(0, 0, [1], [2, 4], [(0, 0)])])
    members = [await lane.member(session, "g", 1.0), await lane.member(other, "g", 0.0)]
    await lane.end("g", members)
    with pytest.raises(UnknownEventType, match=told_of(ref)):
        await asyncio.wait_for(Assembler(event_log, lane.lane).run(), 60)
    batches, number = topics.BATCHES.name, topics.BATCHES.partition_of(lane.lane)
    assert [one.ref async for one in event_log.read(batches, number, 0) if one.ref != ref] == []


PARTITION = {"groups.v1": 0, "batches.v1": 1, "sessions.v1": 2}
"""A lane's, and so a partition of groups.v1 and batches.v1 of its own."""


async def test_replay_does_not_say_that_all_is_well_beside_what_it_cannot_read(log: EventLog) -> None:
    lane = LaneWorld(log, lane="main-0")
    await lane.configure()
    assert str(await rebuild_all(log, lane.lane)) == "0/0 byte-identical"
    ref = await newer(log, topics.BATCHES.name, lane.lane)
    with pytest.raises(UnknownEventType, match=told_of(ref)):
        await rebuild_all(log, lane.lane)


async def test_a_session_with_a_newer_record_is_left_alone_and_the_others_go_on(
    event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folded without the record it would go on from a state that its owner did not leave."""
    from support.crash_child import Handle
    from support.session_world import TOKENIZER

    sessions = [str(uuid.uuid4()) for _ in range(2)]
    firsts = [
        await event_log.append("sessions.v1", one, an_event(SessionOpened(session_id=one, policy="p")))
        for one in sessions
    ]
    ref = await newer(event_log, "sessions.v1", sessions[0])
    journal = KafkaJournal(event_log, "test")
    with pytest.raises(UnknownEventType, match=told_of(ref)):
        await journal.read(sessions[0], firsts[0].offset)
    store = ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none")
    lane = LaneWorld(event_log).configuration()
    deployment = Deployment(
        kafka=event_log.config, store=store, lane=lane, data_dir="", tokenizer_file=str(TOKENIZER), warm_start_dir=""
    )
    monkeypatch.setattr(session_actor, "actor_handle", lambda _name, _namespace: Handle())
    host = await asyncio.to_thread(session_actor.SessionActor, deployment, "session-0")
    try:
        start = WorkspaceStart(image="", files={})
        await host.open(
            [
                SessionSpec(SessionOpened(session_id=one, policy="p"), "x", start, history_floor=first.offset)
                for one, first in zip(sessions, firsts, strict=True)
            ]
        )

        async def taken_up() -> bool:
            others = await journal.read(sessions[1], firsts[1].offset)
            status = await host.status()
            return len(others) > 1 and status.active == [sessions[1]]

        await until(taken_up)
    finally:
        await asyncio.to_thread(host._loop.stop)
    partition, end = ref.partition, ref.offset + 1
    behind = [one.key async for one in event_log.read("sessions.v1", partition, end)]
    assert sessions[0] not in behind


async def test_the_tables_stand_still_at_a_newer_record_and_say_so(log: EventLog, tmp_path: Path) -> None:
    ref = await newer(log, topics.REWARDS.name, "s")
    store = ObjectStoreAddress(endpoint="", bucket="none")
    lane = LaneWorld(log).configuration()
    deployment = Deployment(
        kafka=log.config, store=store, lane=lane, data_dir=str(tmp_path), tokenizer_file="", warm_start_dir=""
    )
    for _ in range(2):  # its offset was not committed: the next one meets it again
        actor = ProjectionsActor(deployment, "projections")

        async def stands_still(actor: ProjectionsActor = actor) -> bool:
            return bool((await actor.state())["fault"])

        try:
            await until(stands_still)
            state = await actor.state()
        finally:
            await asyncio.to_thread(actor._loop.stop)
        assert (state["running"], state["starts"]) == (False, 1)
        assert "stands still" in state["fault"] and state["fault"].endswith(f" at {ref}")
