"""`odradek batch`: what a batch was made of and what it made, and which batches and versions saw given data.

Needs only the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, Context, command_options
from odradek.infra.cli.figures import STEP
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.streams.events.batches import BatchMember
    from odradek.streams.log import EventLog
    from odradek.streams.replay.lineage import BatchLineage, EventAt, TrainedGroup
    from odradek.streams.replay.sightings import Seen


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `list`."""

    batch_id: str
    lane: str
    ordinal: int
    at: str
    members: int
    groups: int
    version: int | None
    """The version that its step made; none while it is not trained."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """List or explain batches; find the batches and weight versions that saw a session, a task or a subject."""


@command.command("list")
@click.option("--lane", help="Only this lane's batches.")
@command_options
def list_(context: Context, lane: str | None) -> None:
    """Every batch on the log, lane by lane, with the version that its step made."""

    async def work(_tell: Say) -> list[Listed]:
        async with opened_log(context) as event_log:
            return await _listed(event_log, lane)

    rows = run(context, "reading batches", work)
    context.result(rows, "\n".join(map(_line, rows)) or "no batch on the log")


async def _listed(event_log: EventLog, lane: str | None) -> list[Listed]:
    from odradek.streams import topics
    from odradek.streams.events.batches import BatchAssembled, StepCompleted
    from odradek.streams.replay.select import readable

    rows: dict[str, Listed] = {}
    async for record in readable(event_log, topics.BATCHES.name):
        match record.event.body:
            case BatchAssembled() as batch if lane in (None, batch.lane):
                rows[batch.batch_id] = Listed(
                    batch_id=batch.batch_id,
                    lane=batch.lane,
                    ordinal=batch.ordinal,
                    at=str(record.ref),
                    members=len(batch.members),
                    groups=len(batch.groups),
                    version=None,
                )
            case StepCompleted() as step if step.batch_id in rows:
                rows[step.batch_id] = msgspec.structs.replace(rows[step.batch_id], version=step.step)
    return list(rows.values())


def _line(row: Listed) -> str:
    made = f"version {row.version}" if row.version is not None else "not trained"
    size = f"{row.members} members of {row.groups} groups"
    return f"{row.batch_id}  {row.lane} {row.ordinal:4d}  {row.at:<16} {size:<26} {made}"


@command.command(epilog=STEP)
@click.argument("batch_id", metavar="ID")
@click.option("--events", is_flag=True, help="Name every event of every member.")
@command_options
def explain(context: Context, batch_id: str, events: bool) -> None:
    """What batch ID (or the only one whose id begins so) was made of, down to sessions and tasks, what was dropped and
    why, and which version its step made."""

    async def work(_tell: Say) -> tuple[BatchLineage, dict[str, list[EventAt]]]:
        from odradek.streams.errors import Terminal
        from odradek.streams.replay.lineage import batch_lineage, events_of

        async with opened_log(context) as event_log:
            try:
                found = await batch_lineage(event_log, batch_id)
            except Terminal as error:
                raise UsageError(str(error)) from None
            members = [member for group in found.groups for member in group.members]
            return found, await events_of(event_log, members) if events else {}

    found, by_session = run(context, "reading the log", work)
    value: dict[str, Any] = msgspec.to_builtins(found)
    if events:
        value["events"] = msgspec.to_builtins(by_session)
    context.result(value, _explained(found, by_session))


def _explained(found: BatchLineage, events: dict[str, list[EventAt]]) -> str:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.metrics.items()))
    members = sum(len(group.members) for group in found.groups)
    step = f"version {found.version} of {found.policy} ({found.manifest_key})" if found.version is not None else ""
    lines = [
        f"batch {found.ordinal} of lane {found.lane} ({found.batch_id}) at {found.at}",
        f"  made: {step or 'nothing yet: no step on it is committed'}{': ' if metrics else ''}{metrics}",
        f"  made of: groups.v1 up to offset {found.input_offset} under the configuration at {found.config_offset}, "
        f"consent up to {found.subjects_offset}; assembler version {found.assembler_version}",
        f"  Merkle root {found.merkle_root}",
        f"  {members} sessions of {len(found.groups)} groups; left out at the step: {len(found.left_out)}; "
        f"subjects: {', '.join(found.subjects) or 'none'}",
    ]
    lines += [line for group in found.groups for line in group_lines(group, members=True, events=events)]
    lines += [
        f"  dropped: group {one.group_id} at groups.v1 offset {one.offset}: {one.reason}" for one in found.dropped
    ]
    return "\n".join(lines)


def group_lines(group: TrainedGroup, *, members: bool, events: dict[str, list[EventAt]] | None = None) -> list[str]:
    """A group for a person: its task, and what each member got; with `members` where each lies on the log."""
    totals = ", ".join(f"{member.total:.3g}" for member in group.members)
    lines = [f"  {group.task_id or '(unknown task)'} ({group.task}): rewards {totals}"]
    for member in group.members if members else ():
        lines.append(f"      {_member(member)}")
        lines += [f"          {one.at}  {one.type}  {one.id}" for one in (events or {}).get(member.session_id, ())]
    return lines


def _member(member: BatchMember) -> str:
    place = f"sessions.v1/{member.partition}@{member.first_offset}-{member.last_offset}"
    versions = f"versions {member.oldest_version}-{member.newest_version}"
    judged = f"reward {member.total:.3g} ({member.reward})  advantage {member.advantage:+.3g}"
    return f"{member.session_id}  {place}  {judged}  {versions}"


@command.command
@click.option("--session", "sessions", multiple=True, metavar="ID", help="This session; repeatable.")
@click.option("--task", metavar="ID", help="Every attempt at this task.")
@click.option("--subject", metavar="NAME", help="Every session of this subject that is in a batch.")
@command_options
def seen(context: Context, sessions: tuple[str, ...], task: str | None, subject: str | None) -> None:
    """Which batches hold the sessions asked for, and which weight versions saw them.

    A version saw them when a step on such a batch made it, or when it was made from one that did: later steps, branches
    and restores included. A session that is not on the log is an error: "nobody saw it" is never the answer to a typo.
    """
    if sum(map(bool, (sessions, task, subject))) != 1:
        raise UsageError("say one of --session ID, --task ID, --subject NAME")

    async def work(_tell: Say) -> Seen:
        from odradek.infra.observe.lookup import session_ids
        from odradek.streams.replay import sightings

        async with opened_log(context) as event_log:
            wanted = list(sessions)
            if task is not None:
                wanted = await sightings.sessions_of_task(event_log, task)
                if not wanted:
                    raise UsageError(f"no attempt at task {task!r} on the log; `odradek task list` shows what there is")
            elif subject is not None:
                wanted = await sightings.sessions_of_subject(event_log, subject)
            found = await sightings.seen(event_log, wanted)
            held = {session for one in found.batches for session in one.sessions}
            if unseen := [session for session in sessions if session not in held]:
                found = await sightings.seen(event_log, [*held, *await session_ids(event_log, unseen)])
            return found

    found = run(context, "reading the log", work)
    context.result(found, _seen(found))


def _seen(found: Seen) -> str:
    if not found.sessions:
        return "no batch holds a session of theirs: is the id right? `odradek session show ID` names a session's"
    if not found.batches:
        return f"{len(found.sessions)} sessions; no batch holds any of them, no version saw them"
    lines = []
    for one in found.batches:
        step = f"step to version {one.version} of {one.policy}" if one.version is not None else "not trained yet"
        left_out = f"; {len(one.left_out)} left out at the step" if one.left_out else ""
        lines.append(f"batch {one.ordinal} of lane {one.lane} ({one.batch_id}) at {one.at}: {step}{left_out}")
        lines += [f"    {session}" for session in one.sessions]
    lines += [f"{one.how:<9} version {one.version} of {one.policy} ({one.manifest_key})" for one in found.versions]
    return "\n".join(lines)
