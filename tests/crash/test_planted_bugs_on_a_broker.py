"""Planted bugs whose harm shows on a real log, store or host: each is caught, and the sound code raises no alarm.

As in `test_planted_bugs.py`, a bug replaces one decision of the product in this process only.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from support.assembly_world import turn
from support.crash.host import held
from support.crash.planted import Which, caught, read
from support.crash.world import World
from support.lane_world import LaneWorld, stopped, until
from support.small_log import SmallLog
from support.waiting import eventually

from odradek.actors.environment.actor import EnvironmentActor
from odradek.actors.environment.ns.sandbox import NsSandbox
from odradek.actors.reward.actor import RewardActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import WorkspaceStart
from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.loop import TrainerLoop
from odradek.actors.trainer.manifest import Place
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.assembly.v1 import batch as batch_v1
from odradek.streams.assembly.v1 import select as select_v1
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import GroupConsumer
from odradek.streams.envelope import Record
from odradek.streams.errors import StreamError
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import SessionCompleted
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.sealing import GroupRule
from odradek.streams.testing import an_event, event_log, fresh_config, kafka_config

__all__ = ["event_log", "fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract

PATIENCE_S = 120.0
TRAINING = {"optimiser": {"learning_rate": 1e-2, "warmup_steps": 0}}
Plant = Callable[[pytest.MonkeyPatch], None]


# -- durable ----------------------------------------------------------------------------------------------------------


async def test_an_append_that_does_not_wait_for_the_broker_is_caught(
    fresh_config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with acks=0, what was sent passes for what is stored; the broker refuses what is larger than its limit."""
    admin = AIOKafkaAdminClient(**fresh_config.client_options())
    await admin.start()
    limit = ConfigResource(ConfigResourceType.TOPIC, fresh_config.name("tasks.v1"), {"max.message.bytes": "2000"})
    await admin.alter_configs([limit])
    await admin.close()

    async def client() -> World:
        acknowledged = []
        async with EventLog(fresh_config) as log:
            for number, size in enumerate((10, 5000, 10)):
                event = an_event(TaskPublished(task_id=f"t{number}", instruction="x" * size))
                try:
                    acknowledged.append((await log.append("tasks.v1", f"t{number}", event), event.id))
                except StreamError:
                    continue
            world = await read(log, "tasks.v1")
        world.acknowledged = acknowledged
        return world

    which = ("durable", "acknowledged_events_are_on_the_log")
    assert which not in caught(await client())

    async def hasty(self: EventLog, topic: str, key: Any, value: Any, headers: Any, **_: Any) -> RecordRef:
        offset = await self.high_water(topic, 0)
        await self._send(await self._producer(None), topic, key, value, headers, 0)
        return RecordRef(topic, 0, offset)

    monkeypatch.setattr(EventLog, "append_raw", hasty)
    assert which in caught(await client())


async def test_a_consumer_that_commits_before_its_output_is_caught(
    fresh_config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = ("durable", "every_end_has_a_verdict")

    async def graded(log: EventLog, group: str) -> World:
        """A grader is killed in the middle of its first verdict; another one goes on from the committed position."""
        small, reached = SmallLog(log), asyncio.Event()

        async def verdict(record: Record) -> None:
            body = record.event.body
            if not isinstance(body, SessionCompleted) or body.group_id != group:
                return
            if not reached.is_set():
                reached.set()
                await asyncio.Event().wait()
            said = RewardUngraded(
                session_id=record.key or "", group_id=group, partition=record.ref.partition, grader="g",
                first_offset=body.first_offset, last_offset=record.ref.offset, grader_version="1", cause="test",
            )  # fmt: skip
            await log.append("rewards.v1", said.session_id, an_event(said))

        async def grading(instance: str) -> asyncio.Task[None]:
            consumer = GroupConsumer(log, group, ["sessions.v1"], verdict, instance=instance)
            return asyncio.create_task(consumer.run())

        await small.session(f"{group}.0", group=group)
        first = await grading("one")
        async with asyncio.timeout(PATIENCE_S):
            await reached.wait()
        await stopped(first)
        await small.session(f"{group}.1", group=group)
        second = await grading("one")

        async def later_one_graded() -> bool:
            return f"{group}.1" in (await read(log, "rewards.v1")).verdicts

        try:
            await until(second, later_one_graded)
            if not monkeypatched:
                await until(second, lambda: both(log, group))
        finally:
            await stopped(second)
        world = await read(log, "sessions.v1", "rewards.v1", whose=group)
        world.settled = True
        return world

    monkeypatched = False
    async with EventLog(fresh_config) as log:
        assert which not in caught(await graded(log, "sound"))

        async def hasty(self: GroupConsumer, consumer: Any, tp: Any, records: list[Record]) -> None:
            await self._commit(consumer, tp, records[-1].ref.offset + 1)
            for record in records:
                await self._handle(consumer, tp, record)

        monkeypatch.setattr(GroupConsumer, "_handle_partition", hasty)
        monkeypatched = True
        assert which in caught(await graded(log, "hasty"))


async def both(log: EventLog, group: str) -> bool:
    return {f"{group}.0", f"{group}.1"} <= (await read(log, "rewards.v1")).verdicts.keys()


# -- assembly ---------------------------------------------------------------------------------------------------------


def resumes_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position that was committed before its output: what was read and not yet batched is skipped."""
    resume = Assembler._resume

    async def hasty(self: Assembler, stage: Any) -> None:
        await resume(self, stage)
        self.position = await self._log.stable_end("groups.v1", self._partition)

    monkeypatch.setattr(Assembler, "_resume", hasty)


def resumes_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A position that was lost: what was batched is batched again."""
    resume = Assembler._resume

    async def forgetful(self: Assembler, stage: Any) -> None:
        await resume(self, stage)
        self.position, self._rule = 0, GroupRule()

    monkeypatch.setattr(Assembler, "_resume", forgetful)


def trains_stale_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = batch_v1.trained_masks
    monkeypatch.setattr(batch_v1, "trained_masks", lambda sequence, ordinal, _bound: masks(sequence, ordinal, 10**6))


def adds_up_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    advantages = select_v1.advantages
    monkeypatch.setattr(select_v1, "advantages", lambda *given: [value * (1 + 2**-20) for value in advantages(*given)])


def asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Consents, "__call__", lambda _self, _subject: True)


ASSEMBLY: list[tuple[Plant, Which]] = [
    (resumes_at_the_end, ("trained once", "every_seal_goes_into_one_batch")),
    (resumes_at_the_beginning, ("trained once", "no_session_is_trained_twice")),
    (trains_stale_tokens, ("known policy", "stale_tokens_are_masked")),
    (adds_up_in_another_order, ("rebuilt", "every_batch_is_rebuilt_byte_for_byte")),
    (asks_nobody, ("consent", "production_is_trained_on_with_consent_only")),
]


@asynccontextmanager
async def holding(lane: LaneWorld) -> AsyncIterator[asyncio.Task[None]]:
    """A holder of the lane that has resumed, inside the block."""
    holder = Assembler(lane.log, lane.lane)
    task = asyncio.create_task(holder.run())

    async def resumed() -> bool:
        return holder.position > 0

    try:
        await until(task, resumed)
        yield task
    finally:
        await stopped(task)


async def as_many_batches(lane: LaneWorld, count: int) -> bool:
    return len(await lane.batches()) >= count


async def assembled(lane: LaneWorld, count: int) -> None:
    """A fresh holder, until the lane has so many batches."""
    async with holding(lane) as task:
        await until(task, lambda: as_many_batches(lane, count))


async def two_batches(log: EventLog, plant: Plant | None, monkeypatch: pytest.MonkeyPatch) -> World:
    """One holder makes a batch of two groups and dies with the third read; the next one finds three more: a person's
    sessions, and two groups with tokens that are too old for the second batch."""
    lane = LaneWorld(log, {"max_staleness": 0})
    await lane.configure()
    with monkeypatch.context() as patched:
        if plant is not None and not plant.__name__.startswith("resumes"):
            plant(patched)
        for _ in range(3):
            await lane.group()
        await assembled(lane, 1)
        if plant is not None:
            plant(patched)
        async with holding(lane) as task:
            await lane.group(origin="production", subject=f"person-of-{lane.lane}")
            for _ in range(2):
                await lane.group(turns=[turn(0, 0, [1, 2], [5, 6, 7, 8], [(0, 0), (2, 1)])])
            await until(task, lambda: as_many_batches(lane, 2))
    world = await read(log, whose=lane.lane)
    report = await rebuild_all(log, lane.lane)
    world.rebuilt = {batch.batch_id: batch.identical for batch in report.batches}
    return world


@pytest.mark.parametrize(("plant", "which"), ASSEMBLY, ids=[plant.__name__ for plant, _ in ASSEMBLY])
async def test_a_bug_in_assembly_is_caught(
    event_log: EventLog, plant: Plant, which: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert which in caught(await two_batches(event_log, plant, monkeypatch))


async def test_sound_assembly_raises_no_alarm(event_log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = caught(await two_batches(event_log, None, monkeypatch))
    assert not found & {which for _, which in ASSEMBLY}


# -- training ---------------------------------------------------------------------------------------------------------


async def test_a_trainer_that_trains_a_batch_again_is_caught(
    event_log: EventLog, s3_config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: where training was is not read from the committed step, and nobody asks which batch is due."""
    tiny_policy(seed=3).save_hf(tmp_path / "warm")
    store = S3Store(S3Config(**s3_config))
    which = ("trained once", "steps_and_batches_pair_up")

    async def trained(lane: LaneWorld, place: Place, steps: int) -> None:
        loop = TrainerLoop(lane.log, Checkpoints(store, place), lane.configuration(), tmp_path / "warm")
        task = asyncio.create_task(loop.run())

        async def enough() -> bool:
            return len(await lane.steps()) >= steps

        try:
            await until(task, enough)
        finally:
            await stopped(task)

    async def lane_of_two(plant: bool) -> World:
        lane = LaneWorld(event_log, {"groups_per_batch": 1, "training": TRAINING})
        place = Place(uuid.uuid4().hex, lane.policy, lane.lane)
        await lane.configure()
        await lane.group()
        await assembled(lane, 1)
        await trained(lane, place, 1)
        await lane.group()  # not before: the sound trainer could have published what it makes of this one too
        await assembled(lane, 2)
        with monkeypatch.context() as patched:
            if plant:
                patched.setattr(TrainerLoop, "_resume", from_the_beginning)
                patched.setattr(TrainerLoop, "_on_record", without_asking)
            await trained(lane, place, 2)
        return await read(event_log, whose=lane.lane)

    resume = TrainerLoop._resume

    async def from_the_beginning(self: TrainerLoop, stage: Any) -> None:
        await resume(self, stage)
        self.position = 0

    async def without_asking(self: TrainerLoop, stage: Any, record: Record) -> None:
        body = record.event.body
        if getattr(body, "ordinal", None) is not None and body.lane == self._lane.lane:
            done = await self._train(record.ref.offset, body)
            await self._commit(stage, record.ref.offset, body, done)

    assert which not in caught(await lane_of_two(False))
    assert which in caught(await lane_of_two(True))
    store.close()


# -- rewards and sandboxes --------------------------------------------------------------------------------------------

TASK = TaskPublished(
    task_id="t", instruction="fix", files={"shop.py": "def total(xs):\n    return max(xs)\n"},
    tests=HiddenTests(
        module="shop", function="total", cases=[HiddenCase(id="a", args=[[2, 3]], want=5)], fail_to_pass=["a"]
    ),
)  # fmt: skip


@pytest.fixture
async def deployment(fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path) -> AsyncIterator[Deployment]:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    address = ObjectStoreAddress(endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(keys))
    lane = LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1)
    yield Deployment(
        kafka=fresh_config, store=address, lane=lane, data_dir=str(tmp_path), tokenizer_file="", warm_start_dir=""
    )


async def test_a_fault_of_ours_that_is_scored_zero_is_caught(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session failed for a fault of ours; another ended, and its grader can't run."""

    async def graded(log: EventLog, name: str) -> World:
        small = SmallLog(log)
        task = await small.append("tasks.v1", name, TASK, name)
        unable = await small.append("tasks.v1", name, ungradable(), name, "unable")
        await small.session(f"{name}.failed", group=name, damage="failed", task=task)
        await small.session(f"{name}.unable", group=name, task=unable)
        actor = await asyncio.to_thread(RewardActor, deployment, "reward-0")

        async def judged() -> World | None:
            world = await read(log, whose=name)
            return world if len(world.verdicts) == 2 else None

        try:
            world = await eventually(judged, "both verdicts", PATIENCE_S)
            assert world is not None
            return world
        finally:
            await actor.shut_down()
            await asyncio.to_thread(actor._loop.stop)

    made_up = {
        ("failure is no reward", "only_finished_sessions_have_a_score"),
        ("failure is no reward", "a_score_reports_every_hidden_test"),
    }
    async with EventLog(deployment.kafka) as log:
        assert not caught(await graded(log, "sound")) & made_up

        def zero(extent: Any, group: str, _cause: str, _retryable: bool) -> RewardAssigned:
            return RewardAssigned(
                session_id=extent.session_id, group_id=group, partition=extent.partition, first_offset=extent.first,
                last_offset=extent.last, grader="g", grader_version="1", components={"solved": 0.0}, total=0.0,
            )  # fmt: skip

        monkeypatch.setattr(RewardActor, "_ungraded", staticmethod(zero))
        assert made_up <= caught(await graded(log, "zero"))


def ungradable() -> TaskPublished:
    """Its set-up fails on every host."""
    return TaskPublished(task_id="u", instruction="fix", files=dict(TASK.files), tests=TASK.tests, setup=["exit 1"])


async def test_a_sandbox_that_is_not_destroyed_is_caught(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    which = ("nothing is left", "the_host_is_clean")
    actor = await asyncio.to_thread(EnvironmentActor, deployment, "environment-0")
    try:

        async def used() -> World:
            await actor.open("s", 1, WorkspaceStart("demo", {"a.py": b"x"}), [])
            assert held(tmp_path), "while it is used it is there"
            await actor.close("s", 1)
            return World({}, left=held(tmp_path))

        assert which not in caught(await used())

        async def leak(_self: NsSandbox) -> None:
            return

        with monkeypatch.context() as patched:
            patched.setattr(NsSandbox, "destroy", leak)
            assert which in caught(await used())
    finally:
        await actor.shut_down()
        await asyncio.to_thread(actor._loop.stop)
    assert held(tmp_path) == []
