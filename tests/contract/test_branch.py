"""Where a branch of a run begins, how it is found again, and which tasks are its own; on a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.small_log import SmallLog
from support.waiting import eventually

from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.infra.cluster.branch import Branch, on_its_branch
from odradek.infra.errors import UsageError
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import GroupDiscarded, LaneConfigured
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

TESTS = Path(__file__).parents[1]
CASES = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])


@pytest.fixture
async def small(fresh_config: KafkaConfig) -> AsyncIterator[SmallLog]:
    """A policy with three versions, and two tasks that its run had."""
    async with EventLog(fresh_config) as log:
        made = SmallLog(log)
        for version in range(3):
            await made.published(version)
        for name in ("one", "two"):
            await publish(made, name, "demo")
        yield made


async def publish(small: SmallLog, name: str, policy: str) -> None:
    task = TaskPublished(
        task_id=name, instruction=f"mend {name}", policy=policy, files={"m.py": ""}, tests=CASES, attempts=2
    )  # fmt: skip
    await small.append("tasks.v1", name, task, name, policy)


def deployment(config: KafkaConfig, lane: str = "other-2", policy: str = "other") -> Deployment:
    configured = LaneConfigured(lane=lane, policy=policy, groups_per_batch=2, attempts=2, max_staleness=2)
    store = ObjectStoreAddress(endpoint="", bucket="none")
    return Deployment(
        kafka=config, lane=configured, policy=policy, store=store, data_dir="", tokenizer_file="", warm_start_dir=""
    )  # fmt: skip


async def test_a_branch_has_its_parent_s_version_and_the_tasks_from_its_beginning_on(small: SmallLog) -> None:
    log = small.log
    lane = (await on_its_branch(deployment(log.config), Branch("demo", "1"))).lane
    assert lane.parent is not None
    assert (lane.parent.policy, lane.parent.version, lane.parent.manifest_key) == ("demo", 1, "0/demo/main-0/1")
    ends = await log.stable_ends("tasks.v1")
    assert lane.tasks_low == [ends[number] for number in range(3)] and sum(lane.tasks_low) == 2
    assert (await on_its_branch(deployment(log.config))).lane.parent is None, "nothing was written yet"


async def test_a_branch_is_found_again_and_is_no_other_one(small: SmallLog) -> None:
    """Started again it goes on as what it is: its tasks do not begin anew, and it takes no other parent."""
    log = small.log
    begun = (await on_its_branch(deployment(log.config), Branch("demo", "1"))).lane
    await small.append("groups.v1", begun.lane, begun, "begun")
    await publish(small, "three", "other")
    assert (await on_its_branch(deployment(log.config))).lane == begun
    assert (await on_its_branch(deployment(log.config), Branch("demo", "1"))).lane == begun
    with pytest.raises(UsageError, match=r"began with 0/demo/main-0/1, not with 0/demo/main-0/2"):
        await on_its_branch(deployment(log.config), Branch("demo", "2"))


async def test_what_is_no_branch_is_refused_in_one_line(small: SmallLog) -> None:
    for lane, policy, at, said in (
        ("main-0", "other", "1", "main line's partitions"),
        ("other-1", "other", "1", "main line's partitions"),
        ("other-9", "other", "1", "no partition"),
        ("other-2", "demo", "1", "a branch is a new policy id"),
        ("other-2", "other", "7", "has no version 7"),
        ("other-2", "other", "sessions.v1/0@1", "no moment of training"),
    ):
        with pytest.raises(UsageError, match=said):
            await on_its_branch(deployment(small.log.config, lane, policy), Branch("demo", at))


async def test_the_parent_s_tasks_are_neither_run_nor_refused_by_the_branch(small: SmallLog) -> None:
    """By the real controller: it decides what came after the branch began, here to refuse it, and nothing before."""
    log = small.log
    lane = (await on_its_branch(deployment(log.config), Branch("demo", "1"))).lane
    await publish(small, "three", "nobody")
    given = {"role": "controller", "point": "", "nth": 0, "kafka": log.config, "lane": lane}

    async def decided() -> list[Any]:
        return [one async for one in bodies(log, "groups.v1") if not isinstance(one, LaneConfigured)]

    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "support.crash_child"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(msgspec.to_builtins(given)).encode())
    process.stdin.close()
    try:
        (refused,) = await eventually(decided, "the controller's first decision", 200.0)
    finally:
        process.kill()
        await process.wait()
    assert isinstance(refused, GroupDiscarded) and "'nobody' is not served here" in refused.detail
