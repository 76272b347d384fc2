"""`odradek task list`: what became of published tasks. Registered by `task.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from odradek.infra.cli.context import Context, command_options

if TYPE_CHECKING:
    from odradek.infra.observe.tasks import TaskRow
    from odradek.streams.log import EventLog

SHOWN = 50
"""Newest tasks on the screen unless told otherwise."""


@click.command("list")
@click.argument("task_id", default="")
@click.option("--refused", is_flag=True, help="Only those that were refused, or whose group was discarded.")
@click.option("--limit", type=click.IntRange(0), default=SHOWN, show_default=True, help="Newest tasks; 0 for all.")
@command_options
def list_tasks(context: Context, task_id: str, refused: bool, limit: int) -> None:
    """What became of every task, of all tenants, or of those whose id begins with TASK_ID: newest last.

    waiting (no group yet), open, sealed, discarded (its group was given up; its sessions are not trained on), refused
    (it gets no group), or repeated (the same task again under its key, which is taken once); with the reason that the
    controller wrote. Needs only the broker.
    """
    from odradek.infra.cli.log import opened_log, run
    from odradek.infra.observe.tasks import UNWANTED, task_text

    async def work(_tell: Callable[[str], None]) -> list[TaskRow]:
        async with opened_log(context) as event_log:
            return await _rows(event_log)

    rows = [
        row
        for row in run(context, "reading tasks and groups", work)
        if row.task_id.startswith(task_id) and (not refused or row.state in UNWANTED)
    ]
    shown = rows[-limit:] if limit else rows
    left = [f"… {len(rows) - len(shown)} older ones (--limit)"] if len(shown) < len(rows) else []
    context.result(shown, "\n".join([*left, *map(task_text, shown)]) or "no such task")


async def _rows(event_log: EventLog) -> list[TaskRow]:
    """Of all task topics, by record time."""
    from odradek.infra.observe.tasks import Decisions, task_rows
    from odradek.streams import topics
    from odradek.streams.admin import existing
    from odradek.streams.errors import UndecodableRecord
    from odradek.streams.events.tasks import TaskPublished
    from odradek.streams.replay.select import bodies

    tasks = []
    for topic in await existing(event_log.config):
        if topics.declared(topic) is not topics.TASKS:
            continue
        for number, end in sorted((await event_log.stable_ends(topic)).items()):
            async for record in event_log.read(topic, number, await event_log.beginning(topic, number), end):
                try:
                    body = record.event.body
                except UndecodableRecord:
                    continue  # a dead letter of the controller's: `odradek dlq list`
                if isinstance(body, TaskPublished):
                    tasks.append((record.timestamp_ms, record.ref, body))
    decisions = Decisions()
    async for body in bodies(event_log, topics.GROUPS.name):
        decisions.apply(body)
    return task_rows([(ref, body) for _, ref, body in sorted(tasks, key=lambda one: one[:2])], decisions)
