"""`odradek task`: publish task directories and files as events, cancel them, list what became of them, check them in a
real sandbox."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_CODES, Context, Number, command_options
from odradek.infra.cli.log import Say, opened_log, run, store_trees
from odradek.infra.cli.task_list import list_tasks
from odradek.infra.errors import UsageError

SOURCE = "odradek-cli"
"""`ce_source` of what this command writes."""


class Published(msgspec.Struct, frozen=True):
    """One task that is on the log now."""

    task_id: str
    topic: str
    partition: int
    offset: int
    purpose: str
    attempts: int
    idempotency_key: str
    """What makes it one task however often it is published: the key given, else the task's id."""


_tenant = click.option("--tenant", default="", help="Publish as this tenant, to its own topic [the deployment's].")


def _topic(context: Context, tenant: str) -> str:
    """The task topic of a tenant; UsageError for one that the configuration does not name."""
    from odradek.streams import topics

    if tenant and tenant not in context.config.kafka.tenant_names:
        known = ", ".join(context.config.kafka.tenant_names) or "none"
        raise UsageError(f"--tenant {tenant!r} is not in kafka.tenants (there is {known})")
    return topics.TASKS.for_tenant(tenant) if tenant else topics.TASKS.name


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Publish, cancel, list or check tasks."""


command.add_command(list_tasks)


@command.command
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--attempts", type=click.IntRange(1), help="Rollouts of each task [the task's, else 8].")
@click.option("--deadline", "deadline_seconds", type=Number(0, min_open=True), help="Seconds from admission.")
@click.option("--priority", type=int, help="Higher is admitted earlier among waiting tasks of the same purpose.")
@click.option("--policy-version", type=click.IntRange(0), help="Sample wholly under this version [the current one].")
@click.option("--purpose", type=click.Choice(["rl", "eval"]), help="Train on it, or only evaluate [the task's].")
@click.option("--idempotency-key", help="The same key twice is one task. Of several tasks each gets KEY/TASK_ID.")
@_tenant
@command_options
def publish(context: Context, sources: tuple[Path, ...], tenant: str, **options: Any) -> None:
    """Publish SOURCES as tasks: a task directory (Harbor layout), a directory of task directories, or a .json/.toml
    file with the body of a task.published event.

    Needs only the broker (and the object store, for a workspace that is not text or above 4 MiB); actors may run or
    not. All or none: a broken source refuses the whole command, in one line,
    before anything is published. A task is taken once for each idempotency key, and the key is the task's id unless
    given: publishing it again does nothing new, and publishing another task under it is refused (a group.discarded says
    why). A task published after its cancellation is a new one; if it had a group, it needs another key.

    \b
    A task directory; its name is the task's id:
      task.toml               limits and metadata; may be empty
      instruction.md          what the agent is asked
      environment/workspace/  the files the agent starts with
      environment/recipe.toml image and set-up commands (optional)
      tests/test.sh           hidden, run in the workspace; writes 0 … 1 to
                              /logs/verifier/reward.txt
      tests/hidden.json       or this: module, function, cases [{id, args, want}],
                              FAIL_TO_PASS, PASS_TO_PASS (ids of cases)
      solution/solve.sh       for `odradek task check` (optional)
    """
    from odradek.actors.tasks.sources import Options, load_sources

    topic = _topic(context, tenant)
    loaded = load_sources(sources, Options(**options, policy=context.config.lane.policy))
    tasks = loaded.tasks
    for note in loaded.notes:
        context.say(f"note: {note}")

    async def work(_tell: Say) -> list[Published]:
        from odradek.streams.envelope import Event, event_id

        done: list[Published] = []
        await store_trees(context, loaded.trees)
        async with opened_log(context, create=True) as event_log:
            for task in tasks:
                key = task.idempotency_key or task.task_id
                event = Event.of(task, id=event_id("task", key), source=SOURCE, meta=_meta(task.purpose, key))
                ref = await event_log.append(topic, task.task_id, event)
                done.append(
                    Published(task.task_id, ref.topic, ref.partition, ref.offset, task.purpose, task.attempts, key)
                )
        return done

    published = run(context, f"publishing {len(tasks)} task{'s' * (len(tasks) != 1)}", work)
    context.result(published, "\n".join(_line(one) for one in published))


def _meta(purpose: Literal["rl", "eval"], key: str) -> Any:
    from odradek.streams.events.meta import Meta

    return Meta(origin=purpose, idempotency_key=key, time_ms=int(time.time() * 1000))


def _line(one: Published) -> str:
    key = f", key {one.idempotency_key}: taken unless another task has it" if one.idempotency_key != one.task_id else ""
    return (
        f"published {one.task_id} at {one.topic}/{one.partition}@{one.offset} ({one.purpose}, {one.attempts} "
        f"attempt{'s' * (one.attempts != 1)}{key})"
    )


@command.command
@click.argument("task_id")
@click.option("--reason", default="", help="Kept with the event.")
@_tenant
@command_options
def cancel(context: Context, task_id: str, reason: str, tenant: str) -> None:
    """Cancel TASK_ID: it is not opened any more, and a group of it under way is discarded.

    Needs only the broker. A cancellation holds for what was published before it, and not for a later task of that id.
    If a client of another kind published it, the two may lie in different partitions, where nothing tells their order:
    then it holds for a later one too, which is refused with the reason.
    """

    topic = _topic(context, tenant)

    async def work(_tell: Say) -> Any:
        from odradek.streams.envelope import Event, event_id
        from odradek.streams.events.tasks import TaskCancelled, TaskPublished
        from odradek.streams.replay.select import bodies

        async with opened_log(context, create=True) as event_log:
            known = False
            async for body in bodies(event_log, topic):
                known |= isinstance(body, TaskPublished) and body.task_id == task_id
            body = TaskCancelled(task_id=task_id, reason=reason)
            event = Event.of(body, id=event_id("cancel", task_id), source=SOURCE, meta=_meta("rl", ""))
            return await event_log.append(topic, task_id, event), known

    ref, known = run(context, f"cancelling {task_id}", work)
    unknown = (
        "" if known else f"; no task of that id is on {topic}: is it right? `odradek task list` shows what there is"
    )
    context.result({"task_id": task_id, "cancelled": ref, "known": known}, f"cancelled {task_id} at {ref}{unknown}")


@command.command
@click.argument("source", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--runs", type=click.IntRange(1), default=5, show_default=True, help="Gradings of the reference solution."
)
@command_options
def check(context: Context, source: Path, runs: int) -> None:
    """Grade the reference solution of the task (or of each task) in SOURCE several times, in real sandboxes and by the
    real grader, and the untouched workspace once.

    A task is admitted if the solution passes every time and the untouched workspace does not. One whose solution passes
    only sometimes is quarantined; the tally of every test is shown. Needs no service. Exit code 1 unless all are
    admitted.
    """
    from odradek.actors.tasks.directory import load_tasks
    from odradek.infra.cli.task_check import check_tasks
    from odradek.infra.config.services import data_dir

    results = run(
        context, "checking", lambda tell: check_tasks(load_tasks(source), runs, data_dir(context.config), tell)
    )
    context.result(results, "\n".join(result.text() for result in results))
    if any(result.verdict != "admitted" for result in results):
        raise click.exceptions.Exit(EXIT_CASE_FAILED)
