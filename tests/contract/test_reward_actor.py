"""The reward actor on a real broker with real sandboxes: one verdict a session, and never a made-up one."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.holder import holder
from support.lane_world import LaneWorld
from support.waiting import eventually

from odradek.actors.reward import grader, torn
from odradek.actors.reward.actor import GROUP, RewardActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.streams import consumers
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import (
    FileChange,
    SessionCompleted,
    SessionFailed,
    SessionOpened,
    ToolCompleted,
    Usage,
    WorkspaceDelta,
)
from odradek.streams.events.tasks import HiddenCase, HiddenScript, HiddenTests, TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import event_log, fresh_config, kafka_config

__all__ = ["event_log", "fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract

DEADLINE_S = 120.0
TASK = TaskPublished(
    task_id="t",
    instruction="fix",
    files={"shop.py": "def total(xs):\n    return max(xs)\n"},
    tests=HiddenTests(
        module="shop", function="total", cases=[HiddenCase(id="a b", args=[[2, 3]], want=5)], fail_to_pass=["a b"]
    ),
)
FIX = WorkspaceDelta(changes=[FileChange(path="shop.py", kind="file", content=b"def total(xs):\n    return sum(xs)\n")])


@dataclass
class World:
    """A deployment's log, with sessions written by hand."""

    log: EventLog
    task: RecordRef = field(default_factory=lambda: RecordRef("", 0, 0))
    refs: dict[str, tuple[RecordRef, RecordRef]] = field(default_factory=dict)

    async def publish(self, task: TaskPublished) -> None:
        self.task = await self._append("tasks.v1", task.task_id, task, Meta())

    async def _append(self, topic: str, key: str, body: Any, meta: Meta, step: str = "") -> RecordRef:
        event = Event.of(body, id=event_id("reward-actor", topic, key, step), source="test", meta=meta)
        return await self.log.append(topic, key, event)

    async def session(
        self,
        name: str,
        *,
        origin: Origin = "rl",
        delta: WorkspaceDelta | None = None,
        end: Any = None,
        poison: bytes = b"",
    ) -> None:
        meta: dict[str, Any] = {"origin": origin, "correlation": "g"}
        opened = SessionOpened(session_id=name, policy="p", group_id="g", task=self.task)
        first = await self._append("sessions.v1", name, opened, Meta(**meta), "opened")
        done = ToolCompleted(call_id="0.0", turn=0, index=0, text="ok", delta=delta)
        if poison:
            await self.log.append_raw("sessions.v1", name.encode(), poison, [("ce_type", b"tool.completed.v1")])
        else:
            await self._append("sessions.v1", name, done, Meta(**meta, epoch=first.offset, seq=0), "call")
        seq = 0 if poison else 1
        end = end or SessionCompleted(reason="done", first_offset=first.offset, usage=Usage(), group_id="g")
        if isinstance(end, SessionFailed):
            end = SessionFailed(cause=end.cause, first_offset=first.offset, group_id="g")
        last = await self._append("sessions.v1", name, end, Meta(**meta, epoch=first.offset, seq=seq), "end")
        self.refs[name] = (first, last)

    async def verdicts(self) -> dict[str, RewardAssigned | RewardUngraded]:
        found: dict[str, RewardAssigned | RewardUngraded] = {}
        for number in await self.log.partitions("rewards.v1"):
            async for record in self.log.read("rewards.v1", number, 0):
                found.setdefault(record.key or "", record.event.body)
        return found

    async def until(self, names: set[str]) -> dict[str, RewardAssigned | RewardUngraded]:
        async def all_there() -> dict[str, RewardAssigned | RewardUngraded] | None:
            found = await self.verdicts()
            return found if names <= found.keys() else None

        found = await eventually(all_there, "a verdict of each session", DEADLINE_S)
        assert found is not None
        return found


@pytest.fixture
async def world(fresh_config: KafkaConfig) -> AsyncIterator[World]:
    async with EventLog(fresh_config) as log:
        yield World(log)


def nobody(name: str, _namespace: str) -> None:
    """There is no session actor here."""
    raise ValueError(name)


@pytest.fixture
async def deployment(
    fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Deployment:
    monkeypatch.setattr(torn, "actor_handle", nobody)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    return Deployment(
        kafka=fresh_config,
        store=ObjectStoreAddress(
            endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(keys)
        ),
        lane=LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1),
        data_dir=str(tmp_path),
        tokenizer_file="",
        warm_start_dir="",
    )


async def grading(deployment: Deployment) -> RewardActor:
    return await asyncio.to_thread(RewardActor, deployment, "reward-0")


async def ended(actor: RewardActor) -> None:
    await actor.shut_down()
    await asyncio.to_thread(actor._loop.stop)


async def held_back(log: EventLog, key: bytes, count: int) -> list[str]:
    """Why each record of a key went to the dead letters, once there are `count`."""

    async def enough() -> list[str]:
        letters = await DeadLetters(log).letters(GROUP, settled=True)
        whys = [letter.why for letter in letters if letter.key == key]
        return whys if len(whys) >= count else []

    return await eventually(enough, "the dead letters", DEADLINE_S)


async def test_every_session_that_ends_gets_one_verdict_with_its_cause(world: World, deployment: Deployment) -> None:
    """Guarantee 11: what could not be graded says why, and is no score."""
    await world.publish(TASK)
    await world.session("solved", delta=FIX)
    await world.session("unsolved")
    await world.session("evaluated", origin="eval", delta=FIX)
    await world.session("ours", end=SessionFailed(cause="host lost", first_offset=0))
    await world.session("torn", poison=b"\xc1")
    await world.session("person's", origin="production", delta=FIX)
    names = {"solved", "unsolved", "evaluated", "ours", "torn"}
    actor = await grading(deployment)
    try:
        found = await world.until(names)
        state = await actor.state()
        torn = await held_back(world.log, b"torn", 2)
    finally:
        await ended(actor)
    assert found.keys() == names, "a person's session has no hidden tests and gets no verdict"
    solved, unsolved, evaluated = (found[name] for name in ("solved", "unsolved", "evaluated"))
    assert isinstance(solved, RewardAssigned) and isinstance(unsolved, RewardAssigned)
    assert isinstance(evaluated, RewardAssigned) and evaluated.components["solved"] == 1.0
    assert (solved.tests_passed, solved.components["solved"]) == (["a b"], 1.0)
    assert (unsolved.tests_failed, unsolved.total) == (["a b"], 0.0)
    first, last = world.refs["solved"]
    assert (solved.partition, solved.first_offset, solved.last_offset) == (first.partition, first.offset, last.offset)
    ours = found["ours"]
    assert isinstance(ours, RewardUngraded) and (ours.cause, ours.retryable) == ("session failed: host lost", True)
    assert state["graded"] == 3
    assert torn == [Why.DECODE, Why.FOLLOWS], "its end follows the record nobody can read"
    lost = found["torn"]
    assert isinstance(lost, RewardUngraded) and lost.retryable and lost.group_id == "g"
    assert lost.cause.startswith("a record of the session is a dead letter (decode) at sessions.v1/")


@pytest.mark.parametrize("later", ["wait", "go_on"])
async def test_a_group_learns_at_once_of_a_session_with_a_record_that_nobody_can_read(
    world: World, deployment: Deployment, later: str
) -> None:
    """It does not wait for the session's end, nor for its own deadline: the session may never end."""
    await world.publish(TASK)
    opened = SessionOpened(session_id="open", policy="p", group_id="g", task=world.task)
    first = await world._append("sessions.v1", "open", opened, Meta(correlation="g"), "opened")
    bad = await world.log.append_raw("sessions.v1", b"open", b"\xc1", [("ce_type", b"tool.completed.v1")])
    await world.log.append_raw("sessions.v1", b"nobody's", b"\xc1", [("ce_type", b"tool.completed.v1")])
    actor = await grading(msgspec.structs.replace(deployment, dead_letter_keys=later))
    try:
        verdict = (await world.until({"open"}))["open"]
        await held_back(world.log, b"nobody's", 1)
    finally:
        await ended(actor)
    assert isinstance(verdict, RewardUngraded) and str(bad) in verdict.cause and verdict.retryable
    assert (verdict.partition, verdict.first_offset, verdict.last_offset) == (first.partition, first.offset, bad.offset)
    assert (await world.verdicts()).keys() == {"open"}


async def test_a_grader_gives_no_verdict_beside_what_a_newer_release_wrote(
    world: World, deployment: Deployment
) -> None:
    """Neither a score nor "ungraded": the release that knows the type grades the session. The state says where."""
    await world.publish(TASK)
    opened = SessionOpened(session_id="newer", policy="p", group_id="g", task=world.task)
    await world._append("sessions.v1", "newer", opened, Meta(correlation="g"), "opened")
    ref = await world.log.append_raw("sessions.v1", b"newer", b"\x80", [("ce_type", b"session.imagined.v9")])
    actor = await grading(deployment)
    try:

        async def stands_still() -> str:
            return str((await actor.state())["fault"])

        fault = await eventually(stands_still, "the consumer to stand still", DEADLINE_S)
    finally:
        await ended(actor)
    assert fault.startswith(f"stands still at {ref}: event type 'session.imagined.v9' is unknown")
    assert await world.verdicts() == {} and await DeadLetters(world.log).letters(settled=True) == []


async def test_a_restarted_grader_goes_on_and_a_repeated_verdict_is_the_same_event(
    world: World, deployment: Deployment
) -> None:
    await world.publish(TASK)
    await world.session("one", delta=FIX)
    first = await grading(deployment)
    await world.until({"one"})
    await ended(first)
    await world.session("two", delta=FIX)
    second = await grading(deployment)
    await world.until({"one", "two"})
    await ended(second)
    identifiers: Counter[str] = Counter()
    for number in await world.log.partitions("rewards.v1"):
        async for record in world.log.read("rewards.v1", number, 0):
            identifiers[record.event.id] += 1
    assert len(identifiers) == 2, "however often a session was graded, its verdict has one id"


async def test_a_verifier_may_be_slower_than_an_ordinary_handler(world: World, deployment: Deployment) -> None:
    """Test suites take minutes; the consumer's usual limit for one record would dead-letter every such session."""
    slow = HiddenScript(files={"test.sh": b"sleep 2; echo 1 > /logs/verifier/reward.txt"})
    await world.publish(TaskPublished(task_id="slow", instruction="x", files=dict(TASK.files), script=slow))
    await world.session("slow")
    actor = await grading(deployment)
    try:
        found = await world.until({"slow"})
        assert actor._consumer._handler_s > grader.GRADE_DEADLINE_S > consumers.HANDLER_S
    finally:
        await ended(actor)
    assert isinstance(found["slow"], RewardAssigned) and found["slow"].components["solved"] == 1.0
    assert await DeadLetters(world.log).letters(GROUP, settled=True) == []


async def test_grading_that_never_ends_is_ungraded_at_its_deadline(
    world: World, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee 12: nothing waits for ever."""
    monkeypatch.setattr(grader, "GRADE_DEADLINE_S", 3.0)
    stuck = HiddenScript(files={"test.sh": b"sleep 300"}, timeout_seconds=300.0)
    await world.publish(TaskPublished(task_id="stuck", instruction="x", files=dict(TASK.files), script=stuck))
    await world.session("stuck")
    actor = await grading(deployment)
    try:
        found = await world.until({"stuck"})
        left = await actor._loop.call(actor._driver.list())
    finally:
        await ended(actor)
    verdict = found["stuck"]
    assert isinstance(verdict, RewardUngraded) and verdict.cause == "grading took longer than 3 s"
    assert left == ()


def commands_with(token: str) -> list[int]:
    """Processes of this machine, sandboxed ones included, that have it in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


async def test_a_grader_killed_while_it_grades_is_followed_by_one_verdict_from_a_fresh_image(
    world: World, deployment: Deployment
) -> None:
    """Guarantee 11: what the killed one left in its sandbox would make the verifier write a zero."""
    token = uuid.uuid4().hex
    grade = "if [ -e graded ]; then echo 0; else echo 1; fi > /logs/verifier/reward.txt; touch graded"
    script = HiddenScript(files={"test.sh": f"{grade}; sh -c 'sleep 4; : {token}'".encode()})
    await world.publish(TaskPublished(task_id="slow", instruction="x", files=dict(TASK.files), script=script))
    await world.session("killed")
    lane = LaneWorld(world.log, lane="main-0")
    async with holder("reward", lane, deployment=msgspec.to_builtins(deployment)):
        await eventually(lambda: commands_with(token), "a verifier that runs", DEADLINE_S)
    assert await world.verdicts() == {}, "it was killed before"
    actor = await grading(deployment)
    try:
        verdict = (await world.until({"killed"}))["killed"]
        left = await actor._loop.call(actor._driver.list())
        await eventually(lambda: not commands_with(token), "the end of what the killed one had begun")
    finally:
        await ended(actor)
    assert isinstance(verdict, RewardAssigned) and verdict.components["solved"] == 1.0
    assert left == ()
    assert await verdicts_of(world.log, "killed") == 1


async def verdicts_of(log: EventLog, session: str) -> int:
    """Records of rewards.v1, repetitions included."""
    found = 0
    for number in await log.partitions("rewards.v1"):
        found += sum([record.key == session async for record in log.read("rewards.v1", number, 0)])
    return found
