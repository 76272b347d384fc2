"""`odradek task list` says what became of every task, and why (infra/observe/tasks.py), on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.cli import Cli

from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import DiscardReason, GroupDiscarded, GroupOpened, GroupSealed
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    await ensure_topics(fresh_config, ["acme"])
    async with EventLog(fresh_config) as log:
        yield log


async def published(log: EventLog, name: str, topic: str = "tasks.v1", key: str = "") -> RecordRef:
    task = TaskPublished(task_id=name, instruction="x", idempotency_key=key)
    return await log.append(topic, name, an_event(task), partition=0)


async def opened(log: EventLog, task: RecordRef, name: str) -> None:
    body = GroupOpened(
        group_id=name, lane="main-0", ordinal=0, task=task, task_id=name, task_digest="", purpose="rl", policy="demo",
        sessions=["a"], version=0, deadline_ms=0,
    )  # fmt: skip
    await log.append("groups.v1", "main-0", an_event(body))


async def discarded(log: EventLog, group: str, reason: DiscardReason, detail: str, task: RecordRef, lane: str) -> None:
    body = GroupDiscarded(group_id=group, lane=lane, reason=reason, detail=detail, task=task)
    await log.append("groups.v1", lane, an_event(body))


async def test_every_task_is_listed_with_what_became_of_it_and_why(
    log: EventLog, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("sealed", "given-up", "refused", "waiting", "open")
    refs = {name: await published(log, name) for name in names}
    await published(log, "again", key="open")
    refs["theirs"] = await published(log, "theirs", "tasks.v1.acme")
    for name in ("sealed", "given-up", "open"):
        await opened(log, refs[name], name)
    await discarded(log, "sealed", "refused", "another policy's", refs["sealed"], "branch-2")
    sealed = GroupSealed(group_id="sealed", lane="main-0", reason="complete", members=[])
    await log.append("groups.v1", "main-0", an_event(sealed))
    await discarded(log, "given-up", "deadline", "1 of 4 members finished", refs["given-up"], "main-0")
    await discarded(log, "r", "refused", "task refused: attempts", refs["refused"], "main-0")
    await discarded(log, "t", "cancelled", "was cancelled", refs["theirs"], "main-0")
    cli = Cli(capsys, log.config)

    rows = (await asyncio.to_thread(cli, "task", "list", "--json")).json
    assert [(row["task_id"], row["state"], row.get("reason", "")) for row in rows] == [
        ("sealed", "sealed", "complete"),
        ("given-up", "discarded", "deadline"),
        ("refused", "refused", "refused"),
        ("waiting", "waiting", ""),
        ("open", "open", ""),
        ("again", "repeated", ""),
        ("theirs", "refused", "cancelled"),
    ]
    assert rows[5]["detail"] == f"the task at {refs['open']} again"
    unwanted = await asyncio.to_thread(cli, "task", "list", "--refused", "--limit", 2)
    assert unwanted.out.splitlines() == [
        "… 1 older ones (--limit)",
        f"refused  {refs['refused']}  rl  refused: refused: task refused: attempts",
        f"theirs  {refs['theirs']}  rl  refused: cancelled: was cancelled",
    ]
    assert (await asyncio.to_thread(cli, "task", "list", "nobody")).out == "no such task\n"
