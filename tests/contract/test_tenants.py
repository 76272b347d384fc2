"""Topics of several tenants on a real broker: followed, never mixed, dead-lettered under the topic they came from."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.cli import Answer, Cli
from support.holder import holder, until
from support.lane_world import LaneWorld

from odradek.actors.controller.actor import NAME
from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.events.meta import Meta
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract


async def test_the_controller_follows_every_tenants_topic_and_takes_its_name_as_the_tenant(
    fresh_config: KafkaConfig,
) -> None:
    """One tenant is configured, another one's topic is only there. A refusal names the record, so the topic too."""
    await ensure_topics(fresh_config, ["acme", "initech"])
    async with EventLog(fresh_config) as log:
        lane = LaneWorld(log, lane="main-0")
        task = TaskPublished(task_id="same", instruction="x", attempts=0)
        for topic in ("tasks.v1", "tasks.v1.acme", "tasks.v1.initech"):
            event = an_event(task, meta=Meta(tenant="somebody-else"))
            ref = await log.append(topic, task.task_id, event)
            assert (await log.read_ref(ref)).event.meta.tenant == (topics.tenant_of(topic) or "default")
        bad = await log.append_raw("tasks.v1.acme", b"k", b"\xc1", [("ce_type", b"task.published.v1")])
        async with holder("controller", lane, tenants=["acme"]) as controller:

            async def refused() -> bool:
                found = [body async for body in bodies(log, topics.GROUPS.name) if isinstance(body, GroupDiscarded)]
                return sorted(body.task.topic for body in found if body.task is not None) == [
                    "tasks.v1",
                    "tasks.v1.acme",
                    "tasks.v1.initech",
                ]

            async def set_aside() -> bool:
                letters = await DeadLetters(log).letters(NAME)
                return [(letter.origin, letter.why) for letter in letters] == [(bad, Why.DECODE)]

            await until(refused)
            await until(set_aside)
            assert controller.starts == 1


async def test_a_task_is_published_and_cancelled_as_a_tenant(
    fresh_config: KafkaConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli = Cli(capsys, fresh_config)
    path = tmp_path / "task.json"
    path.write_text(json.dumps({"task_id": "a", "instruction": "b", "script": {"files": {"test.sh": ""}}}))
    tenants = ("--set", "kafka.tenants=initech,acme")
    unknown = await _in_thread(cli, "task", "publish", path, "--tenant", "nobody", *tenants)
    assert unknown.code == 2 and "'nobody' is not in kafka.tenants (there is initech, acme)" in unknown.err
    published = await _in_thread(cli, "task", "publish", path, "--tenant", "acme", "--json", *tenants)
    assert [one["topic"] for one in published.json] == ["tasks.v1.acme"]
    cancelled = await _in_thread(cli, "task", "cancel", "a", "--tenant", "acme", *tenants)
    assert cancelled.code == 0 and "tasks.v1.acme/" in cancelled.out
    async with EventLog(fresh_config) as log:
        assert sum((await log.stable_ends("tasks.v1")).values()) == 0


async def _in_thread(cli: Cli, *arguments: object) -> Answer:
    """The command has a loop of its own."""
    return await asyncio.to_thread(cli, *arguments)
