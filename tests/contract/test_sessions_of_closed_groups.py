"""Every session ends with a reason on the log, also one whose group is closed while its host is down
(actors/controller/endings.py): the real controller in a process of its own, a real session host, a real broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.holder import Holder, holder, told, until
from support.lane_world import LaneWorld

from odradek.streams import topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import GroupDiscarded, GroupOpened
from odradek.streams.events.sessions import CancelRequested, MessageReceived, SessionCompleted, SessionEvent
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskCancelled, TaskPublished
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])


async def of(log: EventLog, session: str) -> list[SessionEvent]:
    return [record.event.body async for record in log.read_key(topics.SESSIONS.name, session, start=0)]


async def have(log: EventLog, sessions: list[str], kind: type[SessionEvent]) -> None:
    async def all_of_them() -> bool:
        return all([any(isinstance(body, kind) for body in await of(log, session)) for session in sessions])

    await until(all_of_them)


async def opened(lane: LaneWorld) -> list[str]:
    """A task published, its group opened; returns the members, which run on their host and wait for a turn."""
    version = VersionPublished(policy=lane.policy, version=0, manifest_key="k/0", manifest_sha256="0")
    await lane.log.append(topics.WEIGHTS.name, lane.policy, an_event(version))
    task = TaskPublished(task_id="t", instruction="x", files={"m.py": ""}, tests=TESTS, attempts=3, policy=lane.policy)
    await lane.log.append(topics.TASKS.name, "t", an_event(task))
    found: list[str] = []

    async def there() -> bool:
        groups = [body async for body in bodies(lane.log, topics.GROUPS.name) if isinstance(body, GroupOpened)]
        found[:] = groups[0].sessions if groups else []
        return bool(found)

    await until(there)
    await have(lane.log, found, MessageReceived)
    return found


async def closed(lane: LaneWorld, members: list[str], controller: Holder) -> None:
    """The group given up while nobody hosts its members."""
    await told(controller, active_sessions=0)
    await lane.log.append(topics.TASKS.name, "t", an_event(TaskCancelled(task_id="t")))

    async def discarded() -> bool:
        found = [body async for body in bodies(lane.log, topics.GROUPS.name) if isinstance(body, GroupDiscarded)]
        return [(body.reason, sorted(body.unfinished)) for body in found] == [("cancelled", sorted(members))]

    await until(discarded)
    assert not [body for one in members for body in await of(lane.log, one) if isinstance(body, SessionCompleted)]


@pytest.mark.parametrize("successor", [False, True])
async def test_a_session_whose_group_is_closed_while_its_host_is_down_ends_once_it_is_back(
    fresh_config: KafkaConfig, tmp_path: Path, successor: bool
) -> None:
    """By the controller that closed the group, and by the next one, which has it from the log alone."""
    down = tmp_path / "down"
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, lane="main-0")
        async with holder("controller", lane, down=str(down)) as controller:
            members = await opened(lane)
            down.touch()
            await closed(lane, members, controller)
            if not successor:
                down.unlink()
                await have(log, members, SessionCompleted)
        if successor:
            async with holder("controller", lane, down=str(down)) as controller:
                await told(controller, ready=True, open_groups=0)
                down.unlink()
                await have(log, members, SessionCompleted)
        for member in members:
            story = await of(log, member)
            (end,) = [body for body in story if isinstance(body, SessionCompleted)]
            (cancel,) = [body for body in story if isinstance(body, CancelRequested)]
            assert (end.reason, cancel.reason) == ("cancelled", "its group was closed")
            assert end.group_id, "so that it gets a verdict, by which the controller knows that it ended"
