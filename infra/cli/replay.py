"""`odradek replay`: rebuild, verify, export and score again from the log alone. Only the broker has to run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_CODES, Context, Number, command_options
from odradek.infra.cli.exports import note
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.cli.replay_rescore import command as rescore
from odradek.infra.config.services import data_dir
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.streams.replay.export import Decode, ExportReport
    from odradek.streams.replay.select import Filter, OffsetRange

LANE = "main-0"
"""The lane that RL groups train on."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Rebuild, verify, export or score again from the log alone: every other actor may be stopped."""


command.add_command(rescore, "rescore")
_lane = click.option("--lane", default=LANE, show_default=True, help="Which lane's batches.")
_batch = click.option("--batch", "batch_id", help="Only the batch of this id.")


@command.command
@click.option("--verify", is_flag=True, help="Compare with what was recorded when it was trained.")
@_lane
@_batch
@command_options
def rebuild(context: Context, verify: bool, lane: str, batch_id: str | None) -> None:
    """Make every batch again from the log, by the code that trained it, and print the digest of its arrays.

    With --verify, every member's leaf hash is compared and its groups are assembled again: prints N/N byte-identical;
    exit code 1 unless all are, or if there is no batch. Members whose subject was erased are named and are no fault.
    """
    if verify:
        _verify(context, lane, batch_id)
        return
    from odradek.infra.cli.replay_work import rebuilt_batches

    async def work(tell: Say) -> Any:
        async with opened_log(context) as event_log:
            return await rebuilt_batches(event_log, lane, batch_id, tell)

    found = run(context, "rebuilding", work)
    context.result(found, "\n".join(one.text() for one in found) or f"no batch of lane {lane}")
    if not found or any(one.missing for one in found):
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


@command.command
@_lane
@_batch
@command_options
def verify(context: Context, lane: str, batch_id: str | None) -> None:
    """Compare every batch with what was recorded, leaf by leaf: rebuilt, erased, missing or mismatch.

    Exit code 1 unless all are byte-identical but for erased members, or if there is no batch.
    """
    _verify(context, lane, batch_id)


def _verify(context: Context, lane: str, batch_id: str | None) -> None:
    from odradek.infra.cli.replay_work import verified_batches

    async def work(tell: Say) -> Any:
        async with opened_log(context) as event_log:
            return await verified_batches(event_log, lane, batch_id, tell)

    report = run(context, "rebuilding", work)
    bad = [one for one in report.batches if not one.identical]
    lines = [f"batch {one.ordinal} ({one.batch_id}): {_why(one)}" for one in bad]
    lines += [] if report.batches else [f"no batch of lane {lane} on the log"]
    context.result(
        {
            "lane": lane,
            "identical": report.identical,
            "batches": len(report.batches),
            "verdicts": [{**msgspec.to_builtins(one), "identical": one.identical} for one in report.batches],
        },
        "\n".join([*lines, str(report)]),
    )
    if any(not one.intact for one in bad) or not report.batches:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


@command.command
@click.option("--session", "sessions", multiple=True, help="Only the session of this id; repeatable.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="[the one of policy.dir]"
)
@command_options
def sessions(context: Context, sessions: tuple[str, ...], tokenizer: Path | None) -> None:
    """Fold every session and compare each record with what its state machine produces from those before it.

    Nothing is sampled and no tool runs. A session stops at its first divergence, named by topic, partition, offset,
    expected and found; exit code 1 if one diverges, or if there is no session. Sessions written with another tokenizer
    are counted and not compared.
    """
    from odradek.actors.policy.directory import TOKENIZER_FILE
    from odradek.infra.cli.replay_work import checked_sessions
    from odradek.infra.cluster.policy import policy_dir

    path = tokenizer or policy_dir(context.config) / TOKENIZER_FILE

    async def work(tell: Say) -> Any:
        async with opened_log(context) as event_log:
            return await checked_sessions(event_log, frozenset(sessions), path, tell)

    found = run(context, "comparing", work)
    lines = [str(one) for one in found.diverged]
    context.result(found.value(), "\n".join([*lines, str(found)]))
    if found.diverged or not found.compared:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


def _why(verdict: Any) -> str:
    leaves = [f"{leaf} {session}" for session, leaf in verdict.leaves.items() if leaf != "rebuilt"]
    whole = [] if verdict.reassembled else ["assembling its groups again gives another batch"]
    return "; ".join([*leaves, *whole])


# -- export ----------------------------------------------------------------------------------------------------------


@command.command
@click.option("--format", "form", type=click.Choice(["jsonl", "parquet"]), required=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file to write.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--since", help="Opened at or after this time (ISO 8601; UTC unless it says otherwise).")
@click.option("--until", help="Opened before this time.")
@click.option(
    "--offsets", multiple=True, metavar="PARTITION:FIRST-LAST", help="Opened there on sessions.v1; repeatable."
)
@click.option("--versions", metavar="N|N-M", help="Sampled wholly under these weight versions.")
@click.option("--task", "tasks", multiple=True, help="Of this task id; repeatable.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Whose task has this label; repeatable.")
@click.option("--min-reward", type=Number(), help="Total reward of at least this.")
@click.option("--max-reward", type=Number(), help="Total reward of at most this.")
@click.option(
    "--origin",
    "origins",
    multiple=True,
    type=click.Choice(["rl", "production", "eval"]),
    help="Of this traffic; repeatable [rl and production].",
)
@click.option("--trained", is_flag=True, help="Only members of an assembled batch.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="[the one of policy.dir]"
)
@command_options
def export(context: Context, form: str, out: Path, overwrite: bool, tokenizer: Path | None, **asked: Any) -> None:
    """Write finished sessions to --out, one row each: tokens, mask, log-probs, versions, rewards, group, task, batch,
    and the transcript as text.

    All conditions given must hold. Evaluation is left out unless asked for by --origin eval; production sessions are
    written only where their subject's consent to train stands. The same filter gives the same rows in the same order,
    as JSON lines byte for byte.
    """
    wanted = _filter(**asked)
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists; --overwrite replaces it")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {out.absolute().parent}")
    from odradek.actors.policy.directory import TOKENIZER_FILE
    from odradek.infra.cluster.policy import policy_dir

    decode = _decoder(tokenizer or policy_dir(context.config) / TOKENIZER_FILE)
    report = run(context, "exporting", lambda tell: _export(context, form, out, wanted, decode, tell))
    left_out = dict(sorted(report.left_out.items()))
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
    value = {"out": str(out), "rows": report.rows, "tokens": report.tokens, "left_out": left_out}
    context.result(value, f"{report.rows} sessions, {report.tokens} tokens in {out}; left out: {reasons}")


async def _export(context: Context, form: str, out: Path, wanted: Filter, decode: Decode, tell: Say) -> ExportReport:
    from odradek.streams.replay.export import export as write
    from odradek.streams.replay.formats import JsonlWriter, ParquetWriter
    from odradek.streams.replay.select import describe

    async with opened_log(context) as event_log:
        described = msgspec.json.encode(describe(wanted), order="deterministic")
        with JsonlWriter(out) if form == "jsonl" else ParquetWriter(out, described) as writer:
            if "production" in wanted.origins:  # there is a file, and nothing in it yet
                note(data_dir(context.config), out, form)
            return await write(event_log, wanted, decode, writer, tell)


def _decoder(path: Path) -> Decode:
    from odradek.actors.policy.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    return lambda ids: tokenizer.decode(ids, show_specials=True)


def _filter(
    since: str | None,
    until: str | None,
    offsets: tuple[str, ...],
    versions: str | None,
    tasks: tuple[str, ...],
    labels: tuple[str, ...],
    origins: tuple[Any, ...],
    **plain: Any,
) -> Filter:
    from odradek.streams.replay.select import Filter

    given = Filter(
        since=_time("--since", since),
        until=_time("--until", until),
        offsets=tuple(_range(text) for text in offsets),
        versions=_span("--versions", versions) if versions is not None else None,
        tasks=frozenset(tasks),
        labels=tuple(_label(text) for text in labels),
        **plain,
    )
    return msgspec.structs.replace(given, origins=frozenset(origins)) if origins else given


def _time(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{option} {text!r} is no ISO 8601 time, such as 2026-11-30T17:40:00+00:00") from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _span(option: str, text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        raise UsageError(f"{option} {text!r}: expected N or N-M") from None
    if low > high:
        raise UsageError(f"{option} {text!r}: the first is above the last")
    return low, high


def _range(text: str) -> OffsetRange:
    from odradek.streams.replay.select import OffsetRange
    from odradek.streams.topics import SESSION_PARTITIONS

    partition, colon, span = text.partition(":")
    if not colon or not partition.isdecimal() or int(partition) >= SESSION_PARTITIONS:
        raise UsageError(f"--offsets {text!r}: expected PARTITION:FIRST-LAST, partitions 0 to {SESSION_PARTITIONS - 1}")
    return OffsetRange(int(partition), *_span("--offsets", span))


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--label {text!r}: expected NAME=VALUE")
    return name, value
