"""What a person lets go of the controller's dead letters (actors/controller/letters.py), with the real controller in a
process of its own on a real broker, and the real command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.cli import Cli
from support.holder import holder, until
from support.lane_world import LaneWorld

from odradek.actors.controller.actor import NAME
from odradek.actors.controller.identity import group_id
from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import PREFIX, DeadLetters, State, Why
from odradek.streams.events.dlq import DeadLetterEvent, DeadLetterRefused, DeadLetterReleased
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskCancelled, TaskPublished
from odradek.streams.events.weights import CurrentWeights, VersionPinned, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

TOPIC = "tasks.v1.acme"
REFUSED = TaskPublished(task_id="late", instruction="x", attempts=0)
"""It has no group but a refusal: the controller here has no session host that answers."""


@pytest.fixture
async def lane(fresh_config: KafkaConfig) -> AsyncIterator[LaneWorld]:
    await ensure_topics(fresh_config, ["acme"])
    async with EventLog(fresh_config) as log:
        yield LaneWorld(log, lane="main-0")


async def put(lane: LaneWorld, ref: RecordRef) -> int:
    """As a build that did not know the type set it aside. Returns the letter."""
    record = await lane.log.read_ref(ref)
    return (await DeadLetters(lane.log).put(NAME, record, Why.DECODE, "a build that did not know it", 0)).offset


async def settled(lane: LaneWorld, letters: dict[int, State]) -> None:
    async def so() -> bool:
        found = await DeadLetters(lane.log).letters(NAME, settled=True)
        return {one.offset: one.state for one in found} == letters

    await until(so)


async def decisions(lane: LaneWorld) -> list[DeadLetterEvent]:
    """What was done about letters."""
    records = [record async for record in lane.log.read(topics.DLQ.name, 0, 0)]
    ours = [one for one in records if not any(name.startswith(PREFIX) for name, _ in one.headers)]
    return [one.event.body for one in ours]


async def refusals(lane: LaneWorld) -> list[GroupDiscarded]:
    return [body async for body in bodies(lane.log, topics.GROUPS.name) if isinstance(body, GroupDiscarded)]


@pytest.mark.parametrize("point", ["controller.before_commit", "controller.after_commit"])
async def test_a_released_task_keeps_its_ids_and_is_taken_once_whenever_the_controller_is_killed(
    lane: LaneWorld, capsys: pytest.CaptureFixture[str], point: str
) -> None:
    """Killed with what follows from the release written or not, and before it counts as delivered."""
    ref = await lane.log.append(TOPIC, REFUSED.task_id, an_event(REFUSED))
    after = TaskCancelled(task_id="nobody's")  # read at its place, behind the letter's
    await lane.log.append(TOPIC, REFUSED.task_id, an_event(after))
    low = [0] * topics.TASKS.partitions
    low[ref.partition] = ref.offset + 1  # behind what is decided: no controller reads it at its place
    lane.settings["tenants_low"] = {TOPIC: low}
    letter = await put(lane, ref)
    cli = Cli(capsys, lane.log.config)
    for _ in range(2):
        answer = await asyncio.to_thread(cli, "dlq", "release", letter, "--reason", "upgraded")
        assert answer.code == 0
    assert [type(body) for body in await decisions(lane)] == [DeadLetterReleased], "twice is once"
    # The first process commits its lane first; the second finds that done, and the task is its first commit.
    async with holder("controller", lane, tenants=["acme"], point=point, nth=2) as controller:
        await settled(lane, {letter: State.DELIVERED})
        assert controller.starts == 2
    mine = [body for body in await refusals(lane) if body.task == ref]
    assert [body.group_id for body in mine] == [group_id(ref)], "as if it had been read at its place"
    again = await asyncio.to_thread(cli, "dlq", "release", letter)
    assert again.code == 2 and "is delivered already" in again.err


async def test_what_this_build_cannot_read_is_set_aside_once_and_refused_again(lane: LaneWorld) -> None:
    bad = await lane.log.append_raw(TOPIC, b"k", b"\xc1", [("ce_type", b"task.published.v1")])

    async def refused() -> bool:
        letters = await DeadLetters(lane.log).letters(NAME, settled=True)
        done = [type(body) for body in await decisions(lane)]
        return letters[0].state is State.DEAD and done == [DeadLetterReleased, DeadLetterRefused]

    for _ in range(2):
        async with holder("controller", lane, tenants=["acme"]) as controller:
            await until(lambda: _ready(controller.state))
            await until(lambda: _some(lane))
            letters = await DeadLetters(lane.log).letters(NAME, settled=True)
            assert [one.origin for one in letters] == [bad], "a restarted controller does not set it aside again"
    async with holder("controller", lane, tenants=["acme"]):
        await DeadLetters(lane.log).release(letters[0].offset, "look again", "ann")
        await until(refused)


async def _some(lane: LaneWorld) -> bool:
    return bool(await DeadLetters(lane.log).letters(NAME, settled=True))


async def _ready(state: dict[str, object]) -> bool:
    return bool(state.get("ready"))


async def test_a_pin_that_is_released_late_does_not_undo_a_later_one(lane: LaneWorld) -> None:
    """It was read at its place when a build that knows it started."""
    for version in (1, 2):
        body = VersionPublished(policy=lane.policy, version=version, manifest_key=f"k/{version}", manifest_sha256="0")
        await lane.log.append(topics.WEIGHTS.name, lane.policy, an_event(body))
    pins = [VersionPinned(policy=lane.policy, version=version) for version in (1, 2)]
    first, _ = [await lane.log.append(topics.WEIGHTS.name, lane.policy, an_event(pin)) for pin in pins]
    letter = await put(lane, first)
    async with holder("controller", lane, tenants=["acme"]) as controller:
        await until(lambda: _ready(controller.state))
        await DeadLetters(lane.log).release(letter, "", "ann")
        await settled(lane, {letter: State.DELIVERED})
        task = await lane.log.append(topics.TASKS.name, "t", an_event(REFUSED))

        async def decided() -> bool:
            return [body.task for body in await refusals(lane)] == [task]

        await until(decided)  # whatever the release led to is written by now
    served = [body async for body in bodies(lane.log, topics.WEIGHTS_CURRENT.name) if isinstance(body, CurrentWeights)]
    assert [body.version for body in served][-1:] == [2]
