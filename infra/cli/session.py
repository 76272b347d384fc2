"""`odradek session`: list what has run and read one session from the log (only the broker has to run); resume or fork
one (in a running deployment)."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, Context, command_options, given
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.actors.policy.template import XmlTemplate
    from odradek.infra.config.tree import Config
    from odradek.infra.observe.fold import RunFold
    from odradek.infra.observe.sessions import SessionBook, SessionNote
    from odradek.infra.observe.transcript import Transcript
    from odradek.infra.serve.again import Fork
    from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
    from odradek.streams.events.sessions import SessionOpened
    from odradek.streams.log import EventLog

LISTED = 50
"""Newest sessions that `list` shows unless told otherwise. More scrolls the first ones away."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `session list`."""

    session_id: str
    origin: str
    group_id: str
    task_id: str
    subject: str
    """Whose it is, of a person's session."""
    attempt: int
    opened: str
    versions: list[int]
    end: str
    """An end reason, `failed`, or empty while it goes on."""
    turns: int
    calls: int
    sampled_tokens: int
    reward: float | None
    solved: bool | None


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """List sessions, read one, resume one, or fork one at any of its turns."""


@command.command("list")
@click.option("--origin", type=click.Choice(["production", "rl", "eval"]), help="Only this traffic.")
@click.option("--group", "group_id", help="Only members of this group.")
@click.option("--task", "task_id", help="Only attempts at this task.")
@click.option("--end", help="Only sessions that ended like this (done, turns, failed, …); 'open' for those going on.")
@click.option("--limit", default=LISTED, show_default=True, type=click.IntRange(0), help="Newest rows; 0 for all.")
@command_options
def list_sessions(context: Context, limit: int, **wanted: str | None) -> None:
    """Sessions on the log, oldest first: origin, group, task, versions, how they ended, turns, calls, reward."""
    from odradek.infra.observe.follow import RunFollower, SessionFollower

    async def work(_tell: Say) -> list[Listed]:
        async with opened_log(context) as event_log:
            fold = await RunFollower(event_log).refresh()
            return listed(await SessionFollower(event_log).refresh(), fold, wanted)

    found = run(context, "reading the log", work)
    shown = found[-limit:] if limit else found
    hidden = len(found) - len(shown)
    context.result(shown, table(shown) + (f"\n{hidden} older sessions not shown (--limit 0)" if hidden else ""))


def listed(book: SessionBook, fold: RunFold, wanted: dict[str, str | None]) -> list[Listed]:
    """Rows in the order of opening."""
    rows = [(book.time(note, note.opened_at), _row(book, fold, note)) for note in book.sessions.values()]
    rows.sort(key=lambda row: row[0])
    return [row for _, row in rows if _matches(row, wanted)]


def _row(book: SessionBook, fold: RunFold, note: SessionNote) -> Listed:
    group = fold.groups.get(note.opened.group_id)
    verdict = fold.verdicts.get(note.session_id)
    opened = time.gmtime(book.time(note, note.opened_at) / 1000)
    return Listed(
        session_id=note.session_id,
        origin=note.origin,
        group_id=note.opened.group_id,
        task_id=group.task_id if group is not None else "",
        subject=note.subject,
        attempt=note.opened.attempt,
        opened=time.strftime("%Y-%m-%dT%H:%M:%SZ", opened),
        versions=note.versions,
        end=note.end,
        turns=len(note.turns),
        calls=len(note.calls),
        sampled_tokens=note.sampled_tokens,
        reward=verdict.total if verdict is not None else None,
        solved=verdict.components.get("solved", 0.0) >= 1.0 if verdict is not None else None,
    )


def _matches(row: Listed, wanted: dict[str, str | None]) -> bool:
    for name, value in wanted.items():
        if value is not None and (getattr(row, name) or ("open" if name == "end" else "")) != value:
            return False
    return True


def table(rows: list[Listed]) -> str:
    """For a terminal: one line a session, widths by content."""
    from odradek.actors.tools.text import show_name

    if not rows:
        return "no session on the log matches"
    head = ("session", "origin", "task or subject", "version", "end", "turns", "calls", "tokens", "reward", "opened")
    cells = [head] + [
        (
            row.session_id,
            row.origin,
            row.task_id or row.subject,
            ",".join(map(str, row.versions)),
            row.end or "open",
            str(row.turns),
            str(row.calls),
            str(row.sampled_tokens),
            "" if row.reward is None else f"{row.reward:.2f}{' solved' if row.solved else ''}",
            row.opened,
        )
        for row in rows
    ]
    lines = [[show_name(cell) for cell in line] for line in cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@command.command
@click.argument("session_id", metavar="ID", callback=given)
@command_options
def show(context: Context, session_id: str) -> None:
    """Read session ID (or the only one whose id begins so) from the log: turns decoded from their tokens, calls,
    results, diffs of what they changed, weight versions, verdict."""
    from odradek.infra.observe.transcript import as_text

    async def work(_tell: Say) -> Transcript:
        async with opened_log(context) as event_log:
            return await read_transcript(event_log, session_id, context.config)

    found = run(context, "reading the log", work)
    context.result(found, as_text(found))


@command.command
@click.argument("session_id", metavar="ID", callback=given)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Follow it to its end, or only hand it over.")
@command_options
def resume(context: Context, session_id: str, wait: bool) -> None:
    """Let session ID go on from its last logged step.

    For a session whose command or host is gone: its files, its context and what its calls changed are taken from the
    log, on whatever host its actor runs now. A session that has ended is only shown. Nobody's folder is changed. Needs
    a running deployment (odradek up).
    """
    _take_up(context, session_id, None, wait)


@command.command
@click.argument("session_id", metavar="ID", callback=given)
@click.option(
    "--at",
    required=True,
    type=click.IntRange(0),
    metavar="TURN",
    help="Turn to sample anew: turns 0 to TURN-1 are kept.",
)
@click.option("--message", default="", help="What to ask at the end of the kept history.")
@click.option(
    "--version", type=click.IntRange(0), metavar="N", help="Sample wholly under this weight version [the current one]."
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Follow it to its end, or only open it.")
@command_options
def fork(context: Context, session_id: str, at: int, message: str, version: int | None, wait: bool) -> None:
    """Branch off a new session from session ID at a turn.

    The fork begins with the very tokens and files that the turn was sampled from, and goes on under a seed of its own
    and the weights of now. It belongs to no group: it is neither graded nor trained. Needs a running deployment
    (odradek up).
    """
    from odradek.infra.serve.again import Fork

    _take_up(context, session_id, Fork(at, message, version), wait)


def _take_up(context: Context, session_id: str, fork: Fork | None, wait: bool) -> None:
    from odradek.infra.cluster.standing import attached
    from odradek.infra.config.services import endpoints
    from odradek.infra.serve.again import take_up
    from odradek.infra.serve.screen import Screen
    from odradek.infra.serve.view import diff_lines

    endpoints(context.config)  # a deployment that does not run is said before anything is read
    screen = Screen(to_stderr=context.as_json)
    context.say("joining the deployment")
    with attached(context.config) as deployment:
        done = asyncio.run(take_up(deployment, screen, session_id, fork, wait=wait))
    if wait:
        screen.show(diff_lines(done.diff))
    context.result(
        {
            "session_id": done.session_id,
            "end": done.end,
            "turns": done.turns,
            "diff": done.diff,
            "weight_versions": list(done.weight_versions),
        },
        f"session {done.session_id}: {done.end or 'handed over'}" + (f" after {done.turns} turns" if done.end else ""),
    )


async def read_transcript(event_log: EventLog, wanted: str, config: Config) -> Transcript:
    """Everything the log has of one session; `UsageError` if there is none, or several begin so."""
    from odradek.infra.observe.lookup import read_session
    from odradek.infra.observe.transcript import transcript
    from odradek.streams import topics
    from odradek.streams.events.sessions import SessionOpened

    session_id, records = await read_session(event_log, wanted)
    opened = next((body for *_, body in records if isinstance(body, SessionOpened)), None)
    files = await _start(event_log, opened)
    found = transcript(
        session_id,
        topics.SESSIONS.partition_of(session_id),
        records,
        files,
        _template(opened, config),
        await _verdict(event_log, session_id),
    )
    if found is None:
        raise UsageError(f"session {session_id}: its opening is not on the log")
    return found


async def _start(event_log: EventLog, opened: SessionOpened | None) -> dict[str, bytes]:
    """The workspace before the first call, where its task says."""
    from odradek.streams.errors import StreamError
    from odradek.streams.events.tasks import TaskPublished

    if opened is None or opened.task is None:
        return {}
    try:
        body = (await event_log.read_ref(opened.task)).event.body
    except StreamError:
        return {}
    return {path: text.encode() for path, text in body.files.items()} if isinstance(body, TaskPublished) else {}


def _template(opened: SessionOpened | None, config: Config) -> XmlTemplate | None:
    """The one the session names, of the configured policy or the shipped one; None if neither is it."""
    from odradek.actors.policy.directory import TOKENIZER_FILE
    from odradek.actors.policy.template import XmlTemplate
    from odradek.actors.policy.tokenizer import Tokenizer
    from odradek.infra.cluster.policy import ASSETS, policy_dir

    for directory in (policy_dir(config), ASSETS):
        tokenizer = Tokenizer.from_file(directory / TOKENIZER_FILE)
        if opened is None or opened.tokenizer in ("", tokenizer.digest):
            return XmlTemplate(tokenizer)
    return None


async def _verdict(event_log: EventLog, session_id: str) -> RewardAssigned | RewardUngraded | None:
    """The first one counts."""
    from odradek.streams import topics
    from odradek.streams.errors import UndecodableRecord
    from odradek.streams.events.rewards import RewardAssigned, RewardUngraded

    async for record in event_log.read_key(topics.REWARDS.name, session_id):
        try:
            body = record.event.body
        except UndecodableRecord:
            continue
        if isinstance(body, RewardAssigned | RewardUngraded):
            return body
    return None
