"""Malformed records on each input topic: dead-lettered with the reason where there is a queue, and nothing stops.

Each consumer is the real one on a real broker: the group consumer that graders use, the controller's intake, the
assembler, the run's fold, rebuild and export.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.small_log import LANE, SmallLog, write_small_log
from support.waiting import eventually

from odradek.actors.controller import actor as controller_actor
from odradek.actors.controller.actor import NAME, ControllerActor
from odradek.actors.controller.core import Controller
from odradek.actors.controller.letters import Letters
from odradek.actors.controller.past import PastSnapshots
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.infra.observe.follow import FOLDED, RunFollower
from odradek.streams import topics
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import GroupConsumer, Retry
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.envelope import Headers, Record
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupDiscarded, GroupOpened
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardRevised
from odradek.streams.events.sessions import EnvironmentClosed
from odradek.streams.events.subjects import ConsentGranted
from odradek.streams.events.tasks import FeedbackGiven, HiddenCase, HiddenTests, TaskCancelled, TaskPublished
from odradek.streams.events.weights import CanaryShared, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.export import export
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.replay.select import Filter
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

TYPE_OF = {
    "tasks.v1": "task.published.v1",
    "feedback.v1": "feedback.given.v1",
    "sessions.v1": "turn.sampled.v1",
    "rewards.v1": "reward.assigned.v1",
    "groups.v1": "group.sealed.v1",
    "batches.v1": "batch.assembled.v1",
    "weights.v1": "version.published.v1",
}
GOOD: dict[str, Any] = {
    "tasks.v1": TaskCancelled(task_id="x"),
    "feedback.v1": FeedbackGiven(session_id="s", verdict="accepted"),
    "sessions.v1": EnvironmentClosed(sandbox_id="s"),
    "rewards.v1": RewardRevised(
        session_id="s", group_id="g", grader="t", grader_version="1", components={}, total=0.0, reason=""
    ),
    "groups.v1": GroupDiscarded(group_id="g", lane="main-0", reason="cancelled"),
    "batches.v1": StepCompleted(
        lane="main-0", policy="p", step=1, batch_id="b", batch_offset=0, manifest_key="k", manifest_sha256="s"
    ),
    "weights.v1": CanaryShared(policy="p", version=0, share=0.1),
}


def malformed(topic: str) -> list[tuple[bytes | None, bytes | None, Headers, str]]:
    """(key, value, headers, part of the reason): what a broken or foreign writer may leave on a topic."""
    kind = TYPE_OF[topic].encode()
    return [
        (b"main-0", b"\xff\xfe\x00garbage", (), "no ce_type header"),
        (b"main-0", b"\xc1", (("ce_type", kind),), "are not a"),
        (b"main-0", b"\x82\xa4body\x80\xa4meta\x80", (("ce_type", kind),), "missing required field"),
        (b"main-0", None, (("ce_type", kind),), "has no value"),
        (b"main-0", b"{", (("ce_type", b"\xfe\xff"),), "header ce_type is not UTF-8"),
        (b"main-0", b"{}", (("ce_type", kind), ("content-type", b"text/html")), "content-type 'text/html'"),
        (b"\xfe\x80", b"x", (("ce_type", kind), ("odd", None)), "are not a"),
    ]


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


async def spoil(log: EventLog, topic: str, *, partition: int | None = None) -> int:
    """Puts every kind of malformed record on a topic; returns how many."""
    for key, value, headers, _ in malformed(topic):
        await log.append_raw(topic, key, value, headers, partition=partition)
    return len(malformed(topic))


@pytest.mark.parametrize("topic", list(TYPE_OF))
async def test_a_group_consumer_dead_letters_malformed_records_and_handles_the_good_one_behind(
    log: EventLog, topic: str
) -> None:
    count = await spoil(log, topic, partition=0)
    good = RecordRef("", 0, 0)
    for number in (1, 2):
        event = GOOD[topic]
        good = await SmallLog(log).append(topic, f"good-{number}", event, number)
    handled: list[RecordRef] = []

    async def handler(record: Record) -> None:
        handled.append(record.ref)

    consumer = GroupConsumer(log, "test", [topic], handler, retry=Retry(attempts=1))
    task = asyncio.create_task(consumer.run())
    await eventually(lambda: len(handled) >= 2, "the records to be handled", watched=task)
    consumer.stop()
    await task
    assert good in handled
    letters = await DeadLetters(log).letters("test")
    assert len(letters) == count
    reasons = [letter.error for letter in letters if letter.why == Why.DECODE]
    assert reasons[0].endswith(f"at {topic}/0@0") and "no ce_type header" in reasons[0]
    for letter, (key, value, headers, _) in zip(letters, malformed(topic), strict=True):
        assert (letter.key, letter.value, letter.headers) == (key, value, headers)


@pytest.mark.parametrize("topic", list(TYPE_OF))
def test_each_kind_of_malformed_record_has_its_own_reason(topic: str) -> None:
    for key, value, headers, reason in malformed(topic):
        record = Record(RecordRef(topic, 0, 7), key, value, headers, 0)
        with pytest.raises(Exception, match=rf".*{reason}.* at {topic}/0@7"):
            _ = record.event


# -- the controller --------------------------------------------------------------------------------------------------


def intake(log: EventLog) -> ControllerActor:
    """The controller's shell without its start-up: what it does with a record is what is tested."""
    actor = ControllerActor.__new__(ControllerActor)
    store = ObjectStoreAddress(endpoint="", bucket="", credentials_file="")
    actor._deployment = Deployment(
        kafka=log.config, store=store, lane=LANE, data_dir="", tokenizer_file="", warm_start_dir=""
    )
    actor._log, actor._core = log, Controller(LANE)
    actor._letters = Letters(log, actor._core, NAME)
    actor._snapshots = PastSnapshots(log, actor._deployment)
    return actor


@pytest.mark.parametrize("topic", ["tasks.v1", "rewards.v1", "batches.v1", "weights.v1"])
async def test_the_controller_dead_letters_each_malformed_record_once_and_takes_the_next(
    log: EventLog, topic: str
) -> None:
    await spoil(log, topic, partition=0)
    task = TaskPublished(task_id="good", instruction="x")
    await SmallLog(log).append("tasks.v1", "good", task, "good")
    records = [record async for record in log.read(topic, 0, 0)]
    records += [record for n in range(3) async for record in log.read("tasks.v1", n, 0) if topic != "tasks.v1"]
    for _ in range(2):  # a restarted controller reads the same records again
        actor = intake(log)
        for record in records:
            await actor._take(record)
    letters = await DeadLetters(log).letters(NAME, settled=True)
    assert len([letter for letter in letters if letter.origin.topic == topic]) == len(malformed(topic))
    assert all(letter.why == Why.DECODE and letter.error for letter in letters)


async def test_a_tick_shorter_than_a_dead_letter_loses_no_record(
    log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick bounds the wait for the first record, not what is done about it."""
    monkeypatch.setattr(controller_actor, "TICK_S", 1e-3)
    await spoil(log, "tasks.v1", partition=0)
    actor = intake(log)
    actor._inbox = asyncio.Queue()
    async for record in log.read("tasks.v1", 0, 0):
        actor._inbox.put_nowait(record)
        await actor._drain()
    assert len(await DeadLetters(log).letters(NAME, settled=True)) == len(malformed("tasks.v1"))


async def test_an_unknown_type_on_an_open_topic_does_not_stop_the_controller(log: EventLog) -> None:
    """Any client may write tasks.v1; a type that no version of ours knows is that client's mistake."""
    ref = await log.append_raw("tasks.v1", b"k", b"{}", [("ce_type", b"nonsense.v9")])
    await intake(log)._take(await log.read_ref(ref))
    assert len(await DeadLetters(log).letters(NAME)) == 1


async def test_the_controller_starts_over_malformed_records_among_its_own_decisions(log: EventLog) -> None:
    for topic in ("groups.v1", "rewards.v1", "batches.v1", "weights.v1"):
        await spoil(log, topic, partition=0)
    assert await intake(log)._recover()


@pytest.mark.parametrize("attempts", [0, -3, 10**6])
def test_a_foreign_task_that_no_deployment_can_run_does_not_hold_up_the_next(attempts: int) -> None:
    core = Controller(LANE)
    core.on_weights(VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="s"))
    for offset, task_id in enumerate(["hostile", "good"]):
        task = TaskPublished(
            task_id=task_id,
            instruction="x",
            files={"m.py": ""},
            tests=HiddenTests(
                module="m", function="f", cases=[HiddenCase(id="1", args=[], want=1)], fail_to_pass=["1"]
            ),
            attempts=attempts if task_id == "hostile" else 2,
        )
        core.on_task(RecordRef("tasks.v1", 0, offset), task)
    decided = core.decide(0, 8, [0] * topics.SESSION_PARTITIONS)
    assert [body.task_id for body in decided if isinstance(body, GroupOpened)] == ["good"]
    assert [body.reason for body in decided if isinstance(body, GroupDiscarded)] == ["refused"]


# -- assembly, the run's fold, replay --------------------------------------------------------------------------------


async def test_the_assembler_batches_on_over_malformed_records_on_every_topic_it_reads(log: EventLog) -> None:
    for topic in ("groups.v1", "batches.v1", "rewards.v1", "sessions.v1"):
        for partition in range(topics.declared(topic).partitions):
            await spoil(log, topic, partition=partition)
    await log.append_raw("subjects.v1", b"x", b"\xc1", [("ce_type", b"consent.granted.v1")])
    small = await write_small_log(log)
    await spoil(log, "groups.v1", partition=0)
    await small.group("d", [0.0, 1.0], version=1)
    batches = await small.batches(2)
    assert [batch.ordinal for batch in batches] == [0, 1]
    assert [member.group_id for member in batches[1].members] == ["c", "c", "d", "d"]


@pytest.mark.parametrize(
    "damage",
    ["undecodable", "malformed"],
)
async def test_a_group_with_a_damaged_session_is_dropped_with_its_reason(log: EventLog, damage: Any) -> None:
    small = SmallLog(log)
    await small.append("groups.v1", LANE.lane, LANE, "lane")
    small.damage["a.1"] = damage
    for group in ("a", "b", "c"):
        await small.group(group, [1.0, 0.0])
    (batch,) = await small.batches(1)
    assert [(one.group_id, one.reason) for one in batch.dropped] == [("a", "undecodable")]
    assert {member.group_id for member in batch.members} == {"b", "c"}


async def test_the_runs_fold_counts_malformed_records_and_shows_the_rest(log: EventLog) -> None:
    await write_small_log(log)
    spoiled = {topic: await spoil(log, topic, partition=0) for topic in FOLDED if topic in TYPE_OF}
    follower = RunFollower(log)
    fold = await follower.refresh()
    assert dict(follower.undecodable) == spoiled
    assert (len(fold.batches), len(fold.steps), sorted(fold.published)) == (1, 1, [0, 1])


async def test_the_runs_fold_goes_over_unknown_types(log: EventLog) -> None:
    await log.append_raw("rewards.v1", b"k", b"\x80", [("ce_type", b"nonsense.v9")], partition=0)
    follower = RunFollower(log)
    await follower.refresh()
    assert follower.undecodable == {"rewards.v1": 1}


async def test_rebuild_and_export_go_over_malformed_records(log: EventLog) -> None:
    await write_small_log(log)
    for topic in ("groups.v1", "batches.v1", "rewards.v1", "sessions.v1"):
        for partition in range(topics.declared(topic).partitions):
            await spoil(log, topic, partition=partition)
    await SmallLog(log).append("subjects.v1", "zoe", ConsentGranted(subject="zoe"), "zoe")
    assert str(await rebuild_all(log, LANE.lane)) == "1/1 byte-identical"

    class Count:
        rows = 0

        def write(self, _row: object) -> None:
            self.rows += 1

    count = Count()
    await export(log, Filter(), str, count)
    assert count.rows == 9
    found = [record async for record in log.read("batches.v1", 0, 0)]
    assert len(found) == 2 + len(malformed("batches.v1"))
    assert sum(isinstance(_body(record), BatchAssembled) for record in found) == 1


def _body(record: Record) -> object:
    try:
        return record.event.body
    except Exception:
        return None
