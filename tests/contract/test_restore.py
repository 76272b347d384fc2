"""`odradek restore` on a real broker and a real store, each rolled back alone: what is given up, what trained again.

Kafka is rolled back by writing an earlier state of its log, offset for offset, into a fresh deployment; the store by
deleting objects. Batches are the real assembler's, steps the real trainer's.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.assembly_world import turn
from support.cli import Cli
from support.lane_world import LaneWorld, until
from support.log_copy import Stored, copied, write
from support.small_log import LANE
from support.training_world import TRAINING, TrainingWorld

from odradek.actors.controller.core import Controller
from odradek.actors.trainer.errors import AdoptionError, BatchError, CheckpointError
from odradek.actors.trainer.manifest import Place
from odradek.actors.trainer.restore import Incarnation, Restored, histories, restore
from odradek.actors.trainer.testing import tiny_policy
from odradek.infra.stack.s3 import S3Access, s3_client
from odradek.streams import faults
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.codec import INLINE_LIMIT
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import ProducerFenced, TransactionLost
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.log import EventLog
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.replay.lost import lost_objects
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config, kafka_config

__all__ = ["fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    tiny_policy(seed=3).save_hf(folder)
    return folder


@pytest.fixture
async def world(kafka_config: KafkaConfig, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    async with lane_of(kafka_config, s3_config, warm_start) as made:
        yield made


@pytest.fixture
async def alone(fresh_config: KafkaConfig, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    """In a deployment of its own, whose log can be copied."""
    async with lane_of(fresh_config, s3_config, warm_start) as made:
        yield made


@asynccontextmanager
async def lane_of(config: KafkaConfig, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    store = S3Store(S3Config(**s3_config))
    async with EventLog(config, BlobStore(store, cache_bytes=0)) as log:
        lane = LaneWorld(log, {"groups_per_batch": 1, "training": TRAINING})
        await lane.configure()
        yield TrainingWorld(lane, store, warm_start, uuid.uuid4().hex)
    store.close()


async def restored(world: TrainingWorld, **options: Any) -> Restored:
    """What `odradek restore` does for the one lane."""
    (history,) = [one for one in await histories(world.lane.log) if one.lane == world.lane.lane]
    incarnation = await Incarnation.unused(world.lane.log, world.store, world.incarnation)
    return await restore(world.lane.log, world.store, history, incarnation, world.warm_start, **options)


async def rolled_back(world: TrainingWorld, config: KafkaConfig, log: EventLog, records: list[Stored]) -> TrainingWorld:
    """The same store under an earlier log."""
    await write(config, records)
    lane = LaneWorld(log, dict(world.lane.settings), lane=world.lane.lane, groups=world.lane.groups)
    return TrainingWorld(lane, world.store, world.warm_start, world.incarnation)


def forget(s3_access: S3Access, *keys: str) -> None:
    for key in keys:
        s3_client(s3_access).delete_object(Bucket=s3_access.bucket, Key=key)


@pytest.fixture
async def earlier(kafka_bootstrap: str) -> AsyncIterator[tuple[KafkaConfig, EventLog]]:
    """A fresh deployment for the rolled-back log."""
    config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
    async with EventLog(config) as log:
        yield config, log


async def test_where_log_and_store_fit_nothing_is_done(world: TrainingWorld) -> None:
    await world.assemble(1)
    await world.train(1)
    before = await copied(world.lane.log)
    found = await restored(world)
    assert (found.begun, found.version, found.manifest_key) == (False, 1, world.checkpoints.place.key(1))
    assert await copied(world.lane.log) == before


async def test_a_manifest_left_by_a_killed_trainer_is_no_reason_to_restore(world: TrainingWorld) -> None:
    async def die() -> None:
        raise faults.Killed

    await world.assemble(1)
    with faults.armed("trainer.after_publish", die), pytest.raises(faults.Killed):
        await asyncio.wait_for(world.loop().run(), 120)
    assert await world.manifest(1) is not None and await world.lane.steps() == []
    assert not (await restored(world)).begun
    await world.train(1)


async def test_the_log_rolled_back_alone(alone: TrainingWorld, earlier: tuple[KafkaConfig, EventLog]) -> None:
    """The store knows versions 1 to 3, the log only version 1, and goes on otherwise: the new batch 1 has the id and
    the offset of the lost one. The trainer must not take version 2 of the lost history for its own."""
    world = alone
    await world.assemble(1)
    await world.train(1)
    moment = await copied(world.lane.log)
    ends = {(one.topic, one.partition): one.offset for one in moment}
    await world.assemble(2, already=1)
    await world.train(3)
    lost = {version: await world.bits(version) for version in (2, 3)}
    lost_batch = (await world.lane.batches())[1]

    after = await rolled_back(world, *earlier, records=moment)
    assert [step.step for step in await after.lane.steps()] == [1]
    assert {(one.topic, one.partition): one.offset for one in await copied(after.lane.log)} == ends
    await after.assemble(1, already=1, totals=[0.0, 1.0])
    ref, again = (await after.lane.batches())[1]
    assert (ref, again.batch_id) == (lost_batch[0], lost_batch[1].batch_id), "nothing but its content tells them apart"
    with pytest.raises(AdoptionError, match=r"batch_root.*odradek restore"):
        await asyncio.wait_for(after.loop().run(), 120)
    assert [step.step for step in await after.lane.steps()] == [1]

    would = await restored(after, dry_run=True)
    found = await restored(after, reason="the broker's disk was restored from Monday")
    assert would == msgspec.structs.replace(found, manifest_key=would.manifest_key)
    place = world.checkpoints.place
    assert (found.begun, found.incarnation, found.version) == (True, f"{world.incarnation}-r1", 1)
    assert (found.restored_from, found.log_only) == (place.key(1), [])
    assert found.store_only == [place.key(2), place.key(3)]
    assert found.train_again == [again.batch_id]

    loop = await after.train(2)
    assert loop.version == 2
    first, begun, second = await marks(after)
    assert (first.manifest_key, second.manifest_key) == (place.key(1), found.manifest_key[:-1] + "2")
    assert (begun.version, begun.given_up, begun.reason[:10]) == (1, [], "the broker")
    assert {version: await world.bits(version) for version in (2, 3)} == lost, "the lost history is left as it is"
    assert (await bits_of(after, found.incarnation, 1)) == (await world.bits(1))[0]
    assert not (await restored(after)).begun, "restoring twice is restoring once"


async def test_case_rlinf_1469_the_store_rolled_back_alone(world: TrainingWorld, s3_access: S3Access) -> None:
    """RLinf/RLinf PR 1469: the last complete version is used, the newer ones are named, and so is what follows.
    The log knows versions 1 to 3, the store only version 1: 2 and 3 are trained again from their batches, and on this
    machine get the same bits."""
    await world.assemble(3)
    await world.train(3)
    had = [await world.bits(version) for version in range(4)]
    key = world.checkpoints.place.key
    shard = (await world.checkpoints.manifest(2)).shard("trainer").key
    forget(s3_access, key(3), shard)
    with pytest.raises(CheckpointError, match=rf"version 3 \({key(3)}\).*odradek restore"):
        await asyncio.wait_for(world.loop().run(), 120)

    found = await restored(world)
    assert (found.begun, found.version, found.restored_from) == (True, 1, key(1))
    assert [why.partition(":")[0] for why in found.log_only] == [key(3), key(2)] and "trainer" in found.log_only[1]
    assert found.store_only == []
    assert found.train_again == [batch.batch_id for _, batch in (await world.lane.batches())[1:]]
    assert served(await world.lane.versions()) == (1, found.manifest_key)

    await world.train(5, version=3)  # steps on the log: three, and the second and third again
    steps = await world.lane.steps()
    assert [step.step for step in steps] == [1, 2, 3, 2, 3]
    assert [step.batch_id for step in steps[3:]] == found.train_again
    place = Place(found.incarnation, world.lane.policy, world.lane.lane)
    assert [step.manifest_key for step in steps[3:]] == [place.key(2), place.key(3)]
    again = [await bits_of(world, found.incarnation, version) for version in (1, 2, 3)]
    assert again == [digest for digest, _ in had[1:]]
    assert served(await world.lane.versions()) == (3, place.key(3))
    report = await rebuild_all(world.lane.log, world.lane.lane)
    assert (report.identical, len(report.batches)) == (3, 3), "past batches are what they were"


async def test_with_nothing_whole_in_the_store_training_begins_with_the_warm_start(
    world: TrainingWorld, s3_access: S3Access
) -> None:
    await world.assemble(1)
    await world.train(1)
    had = [await world.bits(version) for version in range(2)]
    forget(s3_access, *[world.checkpoints.place.key(version) for version in (0, 1)])
    found = await restored(world)
    assert (found.begun, found.version, found.restored_from) == (True, 0, "")
    await world.train(2, version=1)
    assert [await bits_of(world, found.incarnation, version) for version in (0, 1)] == [digest for digest, _ in had]


async def test_a_name_that_only_the_store_remembers_is_not_taken_again(world: TrainingWorld) -> None:
    """Restored twice, and the log knows of neither: the next incarnation is the third."""
    await world.assemble(1)
    await world.train(1)
    for number in (1, 2):
        key = Place(f"{world.incarnation}-r{number}", world.lane.policy, world.lane.lane).key(1)
        await world.store.put(key, b"{}")
    found = await restored(world)
    assert (found.begun, found.incarnation) == (True, f"{world.incarnation}-r3")
    assert len(found.store_only) == 2


async def test_a_trainer_that_still_runs_is_fenced(world: TrainingWorld, s3_access: S3Access) -> None:
    await world.assemble(2)
    await world.train(1)
    await world.train(2)
    task = asyncio.create_task((zombie := world.loop()).run())

    async def caught_up() -> bool:
        return zombie.version == 2

    await until(task, caught_up)
    forget(s3_access, world.checkpoints.place.key(2))
    assert (await restored(world)).version == 1
    await world.assemble(1, already=2)
    with pytest.raises((ProducerFenced, TransactionLost)):
        await asyncio.wait_for(task, 120)
    assert [step.step for step in await world.lane.steps()] == [1, 2]


async def test_the_command_says_what_it_gives_up(
    world: TrainingWorld, s3_access: S3Access, s3_config: dict[str, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The deployment's incarnation is its prefix; nothing of the stack but broker and store runs."""
    config = world.lane.log.config
    world = TrainingWorld(world.lane, world.store, world.warm_start, config.prefix)
    await world.assemble(2)
    await world.train(2)
    forget(s3_access, world.checkpoints.place.key(2))
    cli, where = at(world, s3_config, tmp_path, capsys)
    unknown = await asyncio.to_thread(cli, "restore", "--lane", "other", *where)
    assert unknown.code == 2 and "no lane other with a version" in unknown.err
    would = await asyncio.to_thread(cli, "restore", "--dry-run", *where)
    assert would.code == 0 and f"would begin incarnation {config.prefix}-r1 at version 1" in would.out
    done = await asyncio.to_thread(cli, "restore", "--json", *where)
    (one,) = json.loads(done.out)["lanes"]
    assert done.code == 0 and one["begun"] and one["version"] == 1 and len(one["train_again"]) == 1
    again = await asyncio.to_thread(cli, "restore", *where)
    assert again.code == 0 and "log and store fit at version 1" in again.out


def at(
    world: TrainingWorld, s3_config: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Cli, tuple[object, ...]]:
    """The command line, and what tells it where the world is."""
    credentials = tmp_path / "keys.json"
    credentials.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    where = (
        "--lane", world.lane.lane, "--data", tmp_path / "none", "--set", f"s3.endpoint={s3_config['endpoint']}",
        "--set", f"s3.bucket={s3_config['bucket']}", "--set", f"s3.credentials_file={credentials}",
    )  # fmt: skip
    return Cli(capsys, world.lane.log.config), where


async def test_objects_of_sessions_that_the_store_lost_are_named_and_where_the_lane_stops(
    world: TrainingWorld, s3_access: S3Access, s3_config: dict[str, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The store lost what large records of two sessions stand for, and a task's workspace: nothing else says so before
    the trainer comes to the batch."""
    await world.assemble(1)
    await world.train(1)
    there = set(await world.store.list("blobs/"))
    tree = await BlobStore(world.store).put(b"a tree")
    await world.lane.task(files_ref=tree)
    said = msgspec.structs.replace(turn(0, 0, [1, 2, 3], [4, 5, 6, 7], [(0, 0)]), messages=["m" * INLINE_LIMIT])
    await world.assemble(1, already=1, turns=[said])
    (_, batch) = (await world.lane.batches())[1]
    objects = {key: await world.store.get(key) for key in set(await world.store.list("blobs/")) - there}
    cli, where = at(world, s3_config, tmp_path, capsys)
    assert (await asyncio.to_thread(cli, "restore", *where)).code == 0, "nothing is lost yet"
    forget(s3_access, *objects)

    told = await asyncio.to_thread(cli, "restore", "--json", *where)
    found = json.loads(told.out)
    members = [member.session_id for member in batch.members]
    assert {(one["what"], one["key"]) for one in found["lost"]} == {
        ("files" if key == tree.key else "record", key) for key in objects
    }
    assert sorted(one["record_key"] for one in found["lost"] if one["what"] == "record") == sorted(members)
    (lane,) = found["lanes"]
    assert told.code == 1 and not lane["begun"]
    assert lane["stops_at"].startswith(f"batch {batch.batch_id}: session {members[0]} needs blobs/")
    text = await asyncio.to_thread(cli, "restore", *where)
    assert "lost: 3 objects" in text.out and f"STOPS at batch {batch.batch_id}" in text.out
    with pytest.raises(BatchError, match=rf"{members[0]} is missing"):
        await asyncio.wait_for(world.loop().run(), 120)

    for key, data in objects.items():
        await world.store.put(key, data)
    assert (await asyncio.to_thread(cli, "restore", *where)).code == 0
    await world.train(2)


async def test_what_an_erased_subject_left_behind_is_not_lost(
    fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path
) -> None:
    ring, store = KeyRing(KeyFiles(tmp_path / "keys")), S3Store(S3Config(**s3_config))
    async with EventLog(fresh_config, BlobStore(store, keys=ring), ring) as log:
        for subject in ("ann", "ben"):
            event = an_event(MessageReceived(message_id="m", text="x" * INLINE_LIMIT), meta=Meta(subject=subject))
            await log.append("sessions.v1", subject, event)
            await BlobStore(store).remove(subject)
        assert [(one.what, one.record_key) for one in await lost_objects(log, store)] == [
            ("record", "ann"), ("record", "ben"),
        ]  # fmt: skip
        await ring.destroy("ann", "asked")
        assert [one.record_key for one in await lost_objects(log, store)] == ["ben"]
    store.close()


async def marks(world: TrainingWorld) -> list[Any]:
    """Steps and incarnations, in order."""
    await world.lane.steps()  # all of them are stable then
    found = [body async for body in bodies(world.lane.log, "batches.v1")]
    return [body for body in found if not isinstance(body, BatchAssembled)]


def served(published: list[Any]) -> tuple[int, str]:
    """What the controller's own fold of weights.v1 says to serve."""
    core = Controller(LANE)
    for body in published:
        core.on_weights(body)
    (current,) = core.decide_weights()
    return current.version, current.manifest_key


async def bits_of(world: TrainingWorld, incarnation: str, version: int) -> str:
    place = Place(incarnation, world.lane.policy, world.lane.lane)
    return (await world.checkpoints.at(place).manifest(version)).weights_digest
