"""`odradek eval` on a real log: without actors it ends unfinished, and started again it keeps what was graded."""

from __future__ import annotations

import asyncio

import pytest
from support.cli import Cli
from support.small_log import SmallLog

from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.events.groups import GroupOpened, GroupSealed
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.weights import CurrentWeights
from odradek.streams.log import EventLog

pytestmark = pytest.mark.contract


@pytest.fixture
def config(kafka_bootstrap: str, topic_prefix: str) -> KafkaConfig:
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=topic_prefix)

    async def publish_version() -> None:
        await ensure_topics(made)
        async with EventLog(made) as log:
            await SmallLog(log).published(0)
            current = CurrentWeights(policy="demo", version=0, manifest_key="k", manifest_sha256="s")
            await SmallLog(log).append("weights.current.v1", "demo", current, 0)

    asyncio.run(publish_version())
    return made


async def tasks(log: EventLog) -> list[Record]:
    return [record for number in range(3) async for record in log.read("tasks.v1", number, 0)]


def grade(config: KafkaConfig, solved: list[float]) -> None:
    """What controller and grader would write of the first waiting tasks."""

    async def write() -> None:
        async with EventLog(config) as log:
            small = SmallLog(log)
            for record, value in zip(await tasks(log), solved, strict=False):
                task = record.event.body
                opened = GroupOpened(
                    group_id=task.task_id,
                    lane="eval-1",
                    ordinal=0,
                    task=record.ref,
                    task_id=task.task_id,
                    task_digest="",
                    purpose="eval",
                    policy="demo",
                    sessions=["s-" + task.task_id],
                    version=0,
                    deadline_ms=2**60,
                    idempotency_key=task.idempotency_key,
                )
                reward = RewardAssigned(
                    session_id="s-" + task.task_id,
                    group_id=task.task_id,
                    partition=0,
                    first_offset=0,
                    last_offset=0,
                    grader="g",
                    grader_version="1",
                    components={"solved": value},
                    total=value,
                )
                sealed = GroupSealed(group_id=task.task_id, lane="eval-1", reason="complete", members=[])
                await small.append("groups.v1", "eval-1", opened, task.task_id, "opened")
                await small.append("rewards.v1", "s", reward, task.task_id, meta=Meta(origin="eval"))
                await small.append("groups.v1", "eval-1", sealed, task.task_id, "sealed")

    asyncio.run(write())


def test_an_evaluation_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str], config: KafkaConfig) -> None:
    cli = Cli(capsys, config)
    wanted = ("eval", "--task-set", "new_combinations", "--count", 3, "--timeout", 1, "--json")
    first = cli(*wanted)
    counts = first.json["sets"]["new_combinations"]
    assert (first.code, first.json["version"]) == (3, 0)
    assert (counts["tasks"], counts["unfinished"]) == (3, 3)
    grade(config, [1.0, 1.0])
    second = cli(*wanted)
    counts = second.json["sets"]["new_combinations"]
    assert (second.code, counts["solved"], counts["unfinished"]) == (3, 2, 1)
    assert "2 kept from before" in second.err
    grade(config, [1.0, 1.0, 0.0])
    third = cli(*wanted)
    counts = third.json["sets"]["new_combinations"]
    assert (third.code, counts["solved"], counts["unsolved"], counts["unfinished"]) == (1, 2, 1, 0)
    assert cli(*wanted, "--require", "0.6").code == 0
    missing = cli("eval", "--version", 9)
    assert missing.code == 2 and "no weight version 9; there is 0" in missing.err
