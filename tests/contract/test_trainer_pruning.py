"""Pruning on a real broker and a real store: what is kept is whole, whatever is killed and whoever asks."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.lane_world import LaneWorld, stopped, until
from support.training_world import TRAINING, TrainingWorld

from odradek.actors.trainer import pruning
from odradek.actors.trainer.checkpoint import Checkpoints, fetch_weights
from odradek.actors.trainer.errors import PrunedVersionError
from odradek.actors.trainer.pruning import Keep
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams import faults
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.events.groups import GroupOpened
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.weights import VersionPinned, VersionPruned
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.testing import event_log, kafka_config

__all__ = ["event_log", "kafka_config"]
pytestmark = pytest.mark.contract

STEPS = 7


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    tiny_policy(seed=3).save_hf(folder)
    return folder


@pytest.fixture
async def world(
    event_log: EventLog, s3_config: dict[str, str], warm_start: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[TrainingWorld]:
    """A lane that keeps two versions and every fourth, and looks after each step."""
    monkeypatch.setattr(pruning, "TOGETHER", 1)
    store = S3Store(S3Config(**s3_config))
    lane = LaneWorld(event_log, {"groups_per_batch": 1, "max_staleness": 100, "training": TRAINING})
    await lane.configure()
    yield TrainingWorld(lane, store, warm_start, uuid.uuid4().hex, Keep(newest=2, every=4), full_every=1)
    store.close()


async def pruned_on_the_log(world: TrainingWorld) -> set[int]:
    log = world.lane.log
    await log.wait_stable("weights.v1", 0, await log.high_water("weights.v1", 0))
    bodies = [record.event.body async for record in log.read("weights.v1", 0, 0)]
    mine = [body for body in bodies if isinstance(body, VersionPruned) and body.policy == world.lane.policy]
    return {version for body in mine for version in body.versions}


async def readable(world: TrainingWorld) -> set[int]:
    """Versions that a reader gets whole, by what the log names; of all others it is told that they were pruned."""
    found = set()
    for version in await world.lane.versions():
        try:
            manifest, _ = await fetch_weights(world.store, version.manifest_key, version.manifest_sha256)
            await Checkpoints(world.store, world.checkpoints.place).restore(manifest)
        except PrunedVersionError as error:
            assert f"version {version.version} ({version.manifest_key}) was pruned" in str(error)
            continue
        found.add(version.version)
    return found


async def train(world: TrainingWorld, pruned: set[int]) -> None:
    """Run a fresh holder over all batches and until the log says that these versions are pruned, and no others."""
    task = asyncio.create_task(world.loop().run())

    async def enough() -> bool:
        trained = len(await world.lane.steps()) == len(await world.lane.batches())
        return trained and await pruned_on_the_log(world) >= pruned

    try:
        await until(task, enough)
    finally:
        await stopped(task)
    assert await pruned_on_the_log(world) == pruned


async def test_old_versions_go_what_is_kept_is_whole_and_the_log_rebuilds_every_batch(world: TrainingWorld) -> None:
    """The log says first, a round later the shards go; rebuilding needs none of them."""
    await world.assemble(STEPS)
    await train(world, {1, 2, 3, 5})
    await world.assemble(1, already=STEPS)
    await train(world, {1, 2, 3, 5, 6})
    whole = await readable(world)
    assert {0, 4, 7, 8} <= whole and whole.isdisjoint({1, 2, 3, 5}), "of 6 the log has only just said so"
    kept = {shard.key for v in whole for shard in (await world.checkpoints.manifest(v)).shards}
    assert set(await world.store.list(f"{world.checkpoints.place.prefix}blobs/")) == kept
    report = await rebuild_all(world.lane.log, world.lane.lane)
    assert report.identical == len(report.batches) == STEPS + 1


@pytest.mark.parametrize("point", [point for point in faults.POINTS if point.startswith("pruning.")])
async def test_a_round_that_was_cut_short_is_finished_by_the_next_one(world: TrainingWorld, point: str) -> None:
    async def die() -> None:
        raise faults.Killed

    await world.assemble(STEPS)
    with faults.armed(point, die), pytest.raises(faults.Killed):
        await asyncio.wait_for(world.loop().run(), 120)
    cut = await pruned_on_the_log(world)
    assert cut and await readable(world) >= {0}
    await train(world, {1, 2, 3, 5})
    await world.assemble(1, already=STEPS)
    await train(world, {1, 2, 3, 5, 6})
    assert (await readable(world)).isdisjoint({1, 2, 3, 5})
    assert await readable(world) >= {0, 4, 7, 8}


async def test_what_is_pinned_or_named_by_an_open_group_is_never_taken(world: TrainingWorld) -> None:
    await world.assemble(3)
    world.keep = Keep(newest=0)
    await world.train(3)
    pin = VersionPinned(policy=world.lane.policy, version=1)
    await world.lane._append("weights.v1", world.lane.policy, pin)
    named: dict[str, Any] = {"ordinal": 0, "task": RecordRef("tasks.v1", 0, 0), "task_id": "t", "task_digest": ""}
    group = GroupOpened(
        group_id="eval", lane="eval-1", purpose="eval", policy=world.lane.policy, sessions=["s"], version=3,
        pinned_version=2, deadline_ms=0, **named,
    )  # fmt: skip
    await world.lane._append("groups.v1", "eval-1", group)
    world.keep = Keep(newest=2, every=0)
    await world.assemble(4, already=3)
    await train(world, {0, 4, 5})
    assert {1, 2, 3, 6, 7} <= await readable(world)
