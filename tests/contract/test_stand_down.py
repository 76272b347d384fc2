"""Two live holders of one role: one of them goes on, the other one stands down, and nobody brings it back.

Each is a process of its own that is started again whenever it ends, as Ray does.
"""

from __future__ import annotations

import asyncio
import uuid

import pytest
from support.holder import Holder, holder, told, until
from support.lane_world import LaneWorld

from odradek.actors.runtime.loop import LoopThread
from odradek.streams import topics
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import ProducerFenced, UnknownEventType
from odradek.streams.events.groups import GroupDiscarded, GroupOpened
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]


async def stood_down(of: Holder) -> None:
    async def so() -> bool:
        return "a newer holder of this transactional id has taken over" in of.state.get("fault", "")

    await until(so)


async def refusals(log: EventLog) -> list[str]:
    found = [body async for body in bodies(log, topics.GROUPS.name)]
    return [body.detail for body in found if isinstance(body, GroupDiscarded)]


async def refuse(log: EventLog, count: int) -> None:
    """Publish a task that every controller refuses, and wait until one has."""
    task = TaskPublished(task_id=f"bad-{count}", instruction="x", attempts=0)
    event = Event.of(task, id=event_id("stand-down", count), source="test")
    await log.append(topics.TASKS.name, task.task_id, event)

    async def decided() -> bool:
        return len(await refusals(log)) >= count

    await until(decided)


@pytest.mark.contract
async def test_of_two_live_controllers_exactly_one_goes_on(fresh_config: KafkaConfig) -> None:
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, lane="main-0")
        async with holder("controller", lane) as first:
            await told(first, ready=True)
            await refuse(log, 1)
            async with holder("controller", lane) as second:
                await told(second, ready=True)
                for count in range(2, 7):
                    await refuse(log, count)
                await stood_down(first)
                assert (first.state["ready"], second.state["ready"], second.state["fault"]) == (False, True, "")
                assert (first.starts, second.starts) == (1, 1), "neither was brought back to fence the other"
                assert len(await refusals(log)) == 6, "each was decided once"


def somebodys(lane: LaneWorld) -> GroupOpened:
    """A decision that neither controller made."""
    return GroupOpened(
        group_id=str(uuid.uuid4()),
        lane=lane.lane,
        ordinal=0,
        task=RecordRef("tasks.v1", 0, 0),
        task_id="t",
        task_digest="",
        purpose="rl",
        policy=lane.policy,
        sessions=["a", "b"],
        version=0,
        deadline_ms=2**53,
    )


@pytest.mark.contract
async def test_an_idle_controller_stands_down_when_it_sees_that_another_one_decides(fresh_config: KafkaConfig) -> None:
    """It has nothing to write, so the broker has no occasion to fence it; it must not go on placing members."""
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, lane="main-0")
        async with holder("controller", lane) as first:
            await told(first, ready=True)
            await log.append(topics.GROUPS.name, lane.lane, an_event(somebodys(lane)))
            await told(first, open_groups=1, fault="")  # a stranger's record alone ends nobody
            async with holder("controller", lane) as second:
                await told(second, ready=True, open_groups=1)
                await log.append(topics.GROUPS.name, lane.lane, an_event(somebodys(lane)))
                await stood_down(first)
                await told(second, ready=True, open_groups=2, fault="")
                assert (first.starts, second.starts) == (1, 1)


@pytest.mark.contract
async def test_of_two_live_assemblers_exactly_one_goes_on(fresh_config: KafkaConfig) -> None:
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, {"groups_per_batch": 1}, lane="main-0")
        await lane.configure()
        async with holder("assembler_actor", lane) as first:
            await lane.group()

            async def batched() -> bool:
                found = await lane.batches()
                return len(found) >= lane.groups

            await until(batched)
            async with holder("assembler_actor", lane) as second:

                async def caught_up() -> bool:
                    return int(second.state.get("position", -1)) > 0

                await until(caught_up)
                for _ in range(3):
                    await lane.group()
                    await until(batched)
                await stood_down(first)
                assert (first.starts, second.starts, second.state["fault"]) == (1, 1, "")
                assert [batch.ordinal for _, batch in await lane.batches()] == [0, 1, 2, 3]


async def test_a_fenced_actor_stays_up_and_says_so() -> None:
    """However the fencing reaches it: alone, or among the errors of a task group; and one that a release has left
    behind."""

    async def fenced() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(3600))
            raise ProducerFenced("taken over by x")

    async def alone() -> None:
        raise ProducerFenced("taken over by x")

    async def answer() -> str:
        return "here"

    async def behind() -> None:
        raise UnknownEventType("taken over by x")

    for work in (fenced(), alone(), behind()):
        loop = LoopThread("fenced")
        loop.main(work, "the writer")

        async def so(loop: LoopThread = loop) -> bool:
            return bool(loop.stood_down)

        await until(so)
        assert loop.stood_down == "stands down: taken over by x"
        assert await loop.call(answer()) == "here"
        await asyncio.to_thread(loop.stop)
