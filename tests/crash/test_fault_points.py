"""Each named fault point by kill -9 of a real process, one before and one after every commit (EXAMPLES §3.13).

What is asserted comes from the log and the store alone: that the crash happened where it should, and that the next
holder loses nothing and does nothing twice. The in-process tests (`tests/contract/test_assembler_loop.py`,
`test_trainer_loop.py`) cover more situations; this covers what only a dead process leaves behind: a socket cut in the
middle and a transaction that nobody aborts.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.crash.plan import UNDER_THE_JOB
from support.lane_world import LaneWorld, stopped, until
from support.waiting import eventually

from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.errors import IncompleteCheckpointError
from odradek.actors.trainer.manifest import Place
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams import faults, topics
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.clients import consumer, partition, start, stop
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.groups import GroupOpened, GroupSealed, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.weights import CurrentWeights, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.testing import event_log, fresh_config, kafka_config

__all__ = ["event_log", "fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract

TESTS = Path(__file__).parents[1]
DEADLINE_S = 200.0
TRAINING = {"optimiser": {"learning_rate": 1e-2, "warmup_steps": 0}}


def of(role: str) -> list[str]:
    return [point for point in faults.POINTS if point.startswith(f"{role}.")]


def test_every_fault_point_has_a_crash_test() -> None:
    """The notary's are in `test_audit_notary.py`, erasure's in `test_privacy_erasure.py`, pruning's in
    `test_trainer_pruning.py`, snapshots' in `test_snapshots.py`, the others in `test_crash_matrix.py`: under the
    whole job."""
    here, elsewhere = (
        ["assembler", "trainer", "controller"],
        ["notary", "erasure", "pruning", "snapshot", *UNDER_THE_JOB],
    )
    assert {point.partition(".")[0] for point in faults.POINTS} <= {*here, *elsewhere}


@asynccontextmanager
async def child(given: dict[str, Any]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A stage as a process of its own; gone after the block, whatever happened."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "support.crash_child"],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def killed_at(given: dict[str, Any]) -> None:
    """Run until it has killed itself at its point."""
    async with child(given) as process, asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert process.returncode == -signal.SIGKILL, stderr.decode()[-2000:]


def request(role: str, lane: LaneWorld, point: str, nth: int, **more: Any) -> dict[str, Any]:
    kafka, configured = msgspec.to_builtins(lane.log.config), msgspec.to_builtins(lane.configuration())
    return {"role": role, "point": point, "nth": nth, "kafka": kafka, "lane": configured, **more}


# -- assembler --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", of("assembler"))
async def test_an_assembler_killed_by_the_system_leaves_every_group_in_exactly_one_batch(
    event_log: EventLog, point: str
) -> None:
    lane = LaneWorld(event_log)
    await lane.configure()
    kept = [await lane.group() for _ in range(4)]
    await killed_at(request("assembler", lane, point, 3 if point == "assembler.group_read" else 1))
    sent = await lane.written()
    assert sent == 1, "one batch was on the broker when it died"
    heir = asyncio.create_task(Assembler(lane.log, lane.lane).run())

    async def both() -> bool:
        return len(await lane.batches()) == 2

    try:
        await until(heir, both)
    finally:
        await stopped(heir)
    batches = [batch for _, batch in await lane.batches()]
    assert await lane.written() == (3 if point == "assembler.before_commit" else 2)
    assert [offset for batch in batches for offset in batch.groups] == kept
    assert [batch.ordinal for batch in batches] == [0, 1]
    assert str(await rebuild_all(lane.log, lane.lane)) == "2/2 byte-identical"


# -- trainer ----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def trained(event_log: EventLog, tmp_path: Path, s3_config: dict[str, str]) -> tuple[LaneWorld, dict[str, Any]]:
    """A lane with two batches, and what a trainer of it needs."""
    tiny_policy(seed=3).save_hf(tmp_path / "warm")
    lane = LaneWorld(event_log, {"groups_per_batch": 1, "training": TRAINING})
    await lane.configure()
    for _ in range(2):
        await lane.group()
    assembling = asyncio.create_task(Assembler(lane.log, lane.lane).run())

    async def both() -> bool:
        return len(await lane.batches()) == 2

    try:
        await until(assembling, both)
    finally:
        await stopped(assembling)
    return lane, {"s3": s3_config, "incarnation": uuid.uuid4().hex, "warm_start": str(tmp_path / "warm")}


@pytest.mark.parametrize("point", of("trainer"))
async def test_a_trainer_killed_by_the_system_trains_no_batch_twice_and_skips_none(
    trained: tuple[LaneWorld, dict[str, Any]], point: str
) -> None:
    lane, more = trained
    store = S3Store(S3Config(**more["s3"]))
    checkpoints = Checkpoints(store, Place(more["incarnation"], lane.policy, lane.lane))

    async def digest(version: int) -> str:
        try:
            return (await checkpoints.manifest(version)).weights_digest
        except IncompleteCheckpointError:
            return ""

    await killed_at(request("trainer", lane, point, 1, **more))
    stored, steps, sent = await digest(1), len(await lane.steps()), await lane.written()
    assert bool(stored) == (point != "trainer.before_publish")
    assert steps == (point == "trainer.after_commit")
    assert sent == 2 + (point in ("trainer.before_commit", "trainer.after_commit"))

    async with child(request("trainer", lane, "", 0, **more)) as heir, asyncio.timeout(DEADLINE_S):

        async def both_trained() -> bool:
            assert heir.returncode is None
            return len(await lane.steps()) >= 2

        await eventually(both_trained, "two steps", DEADLINE_S)
    assert [step.batch_id for step in await lane.steps()] == [batch.batch_id for _, batch in await lane.batches()]
    assert [version.version for version in await lane.versions()] == [0, 1, 2]
    assert stored in ("", await digest(1)), "what was stored before the crash is what the log names"
    assert len({await digest(version) for version in range(3)}) == 3
    store.close()


# -- controller -------------------------------------------------------------------------------------------------------


async def bodies(log: EventLog, topic: str) -> list[Any]:
    await log.wait_stable(topic, 0, await log.high_water(topic, 0))
    return [record.event.body async for record in log.read(topic, 0, 0)]


async def raw_keys(log: EventLog, topic: str) -> Counter[str]:
    """Keys of all records, committed or not."""
    reader = consumer(log.config, committed=False)
    await start(log.config, reader)
    try:
        place = partition(log.config, topic, 0)
        reader.assign([place])
        reader.seek(place, 0)
        end, keys = (await reader.end_offsets([place]))[place], Counter[str]()
        while await reader.position(place) < end:
            keys.update((r.key or b"").decode() for r in (await reader.getmany(place, timeout_ms=200)).get(place, []))
        return keys
    finally:
        await stop(reader)


async def append(log: EventLog, topic: str, key: str, body: Any) -> RecordRef:
    return await log.append(topic, key, Event.of(body, id=event_id("crash", topic, key), source="test"))


async def a_finished_group(log: EventLog, lane: LaneWorld) -> None:
    """A group as a former controller opened it, with all its verdicts, and version 0 published."""
    opened = GroupOpened(
        group_id="g", lane=lane.lane, ordinal=0, task=RecordRef("tasks.v1", 0, 0), task_id="t", task_digest="d",
        purpose="rl", policy=lane.policy, sessions=["g.0", "g.1"], version=0, deadline_ms=2**53,
    )  # fmt: skip
    await append(log, topics.GROUPS.name, lane.lane, opened)
    for attempt, session in enumerate(opened.sessions):
        reward = RewardAssigned(
            session_id=session, group_id="g", partition=0, first_offset=0, last_offset=1, grader="g",
            grader_version="1", components={"solved": float(attempt)}, total=float(attempt),
        )  # fmt: skip
        await append(log, topics.REWARDS.name, session, reward)
    published = VersionPublished(policy=lane.policy, version=0, manifest_key="k", manifest_sha256="s", lane=lane.lane)
    await append(log, topics.WEIGHTS.name, lane.policy, published)


@pytest.mark.parametrize("point", of("controller"))
async def test_a_controller_killed_by_the_system_decides_everything_once(fresh_config: KafkaConfig, point: str) -> None:
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, lane="main-0")
        await a_finished_group(log, lane)
        await killed_at(request("controller", lane, point, 1))
        committed = point == "controller.after_commit"
        assert (await raw_keys(log, topics.GROUPS.name))["main-0"] == 2, "its configuration was on the broker"
        configured = [b for b in await bodies(log, topics.GROUPS.name) if isinstance(b, LaneConfigured)]
        assert len(configured) == committed

        await killed_at(request("controller", lane, point, 1 if committed else 2))
        async with child(request("controller", lane, "", 0)) as heir, asyncio.timeout(DEADLINE_S):

            async def decided() -> bool:
                assert heir.returncode is None
                return bool(await sealed(log) and await bodies(log, topics.WEIGHTS_CURRENT.name))

            await eventually(decided, "a seal and the current weights", DEADLINE_S)
        kinds = Counter(type(body).__name__ for body in await bodies(log, topics.GROUPS.name))
        assert kinds == {"GroupOpened": 1, "LaneConfigured": 1, "GroupSealed": 1}
        (current,) = await bodies(log, topics.WEIGHTS_CURRENT.name)
        assert isinstance(current, CurrentWeights) and current.version == 0
        if point == "controller.before_commit":
            assert (await raw_keys(log, topics.GROUPS.name))["main-0"] > 3, "decisions were sent and never seen"


async def sealed(log: EventLog) -> list[GroupSealed]:
    return [body for body in await bodies(log, topics.GROUPS.name) if isinstance(body, GroupSealed)]
