"""`odradek dlq`: records that a consumer could not handle. Needs only the broker."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, Context, command_options
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.streams.dlq import DeadLetter, DeadLetters

SHOWN_BYTES = 4096
"""Bytes of a value that `show` prints. Too few hide the fault; more floods a terminal."""


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One dead letter as it is shown."""

    letter: int
    """Offset on dlq.v1: what show, release and drop take."""
    consumer: str
    origin: str
    key: str
    state: str
    why: str
    """decode: its bytes fit no type; handler: the consumer failed on it; follows: an earlier record of its key is
    here."""
    error: str
    attempts: int
    bytes: int
    headers: dict[str, str] = {}
    decided_by: str = ""
    """Who released or dropped it, and why."""
    reason: str = ""
    value: str = ""
    """Of `show` only: as text, bytes that are not UTF-8 escaped."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """List, show, release or drop records that a consumer could not handle."""


_letter = click.argument("letter", type=click.IntRange(0))
_by = click.option("--by", default=getpass.getuser, help="Who decides; kept with the decision [your user name].")


@command.command("list")
@click.option("--consumer", help="Only letters of this consumer.")
@click.option("--settled", is_flag=True, help="Also those that were delivered or dropped.")
@command_options
def list_(context: Context, consumer: str | None, settled: bool) -> None:
    """Letters in order: where each came from, who refused it, and why."""

    async def work(letters: DeadLetters) -> list[DeadLetter]:
        return await letters.letters(consumer, settled=settled)

    found = [shown(one) for one in _run(context, "reading dead letters", work)]
    context.result(found, "\n".join(map(_line, found)) or "no dead letters")


@command.command
@_letter
@command_options
def show(context: Context, letter: int) -> None:
    """One letter with its headers and its bytes (they may hold a user's content)."""

    async def work(letters: DeadLetters) -> DeadLetter:
        return await _existing(letters, letter)

    found = shown(_run(context, "reading dead letters", work), whole=True)
    headers = [f"  {name}: {value}" for name, value in found.headers.items()]
    context.result(found, "\n".join([_line(found), *headers, "", found.value]))


@command.command
@_letter
@click.option("--reason", default="", help="Kept with the decision.")
@_by
@command_options
def release(context: Context, letter: int, reason: str, by: str) -> None:
    """Deliver the whole key of LETTER again, in order and with the ids it had, to the consumer that refused it (when it
    runs), never to the source topic. What fails again is held back as before."""

    async def work(letters: DeadLetters) -> list[DeadLetter]:
        await _open(letters, letter)
        return await letters.release(letter, reason, by)

    found = [shown(one) for one in _run(context, "releasing", work)]
    context.result(found, f"released {len(found)} of key {found[0].key!r} to {found[0].consumer}")


@command.command
@_letter
@click.option("--reason", required=True, help="Why; kept with the decision.")
@_by
@command_options
def drop(context: Context, letter: int, reason: str, by: str) -> None:
    """Give LETTER up: it is never delivered. Its key flows again when no open letter of it is left.

    Nothing is deleted: the letter stays on the log, and who dropped it and why stands beside it (`dlq list --settled`).
    """

    async def work(letters: DeadLetters) -> DeadLetter:
        await _open(letters, letter)
        return await letters.drop(letter, reason, by)

    found = shown(_run(context, "dropping", work))
    context.result(found, f"dropped {found.letter} ({found.origin})")


def _run(context: Context, what: str, work: Callable[[DeadLetters], Coroutine[Any, Any, Any]]) -> Any:
    async def opened(_tell: Say) -> Any:
        from odradek.streams.dlq import DeadLetters

        async with opened_log(context) as event_log:
            return await work(DeadLetters(event_log))

    return run(context, what, opened)


async def _existing(letters: DeadLetters, offset: int) -> DeadLetter:
    await letters.catch_up()
    if offset not in letters.fold.letters:
        raise UsageError(f"no dead letter {offset}; `odradek dlq list --settled` shows what there is")
    return letters.fold.letters[offset]


async def _open(letters: DeadLetters, offset: int) -> None:
    """A letter that is settled can't be decided again; that would only look as if something happened."""
    letter = await _existing(letters, offset)
    if not letter.open:
        raise UsageError(f"dead letter {offset} is {letter.state} already")


def shown(letter: DeadLetter, *, whole: bool = False) -> Letter:
    """For people and programs; bytes that are no text are escaped."""
    value = letter.value or b""
    cut = f" … ({len(value) - SHOWN_BYTES} bytes more)" if len(value) > SHOWN_BYTES else ""
    return Letter(
        letter=letter.offset,
        consumer=letter.consumer,
        origin=str(letter.origin),
        key=_text(letter.key),
        state=letter.state.value,
        why=letter.why,
        error=letter.error,
        attempts=letter.attempts,
        decided_by=letter.decided_by,
        reason=letter.reason,
        bytes=len(value),
        headers={name: _text(data) for name, data in letter.headers} if whole else {},
        value=_text(value[:SHOWN_BYTES]) + cut if whole else "",
    )


def _text(data: bytes | None) -> str:
    return "(none)" if data is None else data.decode("utf-8", "backslashreplace")


def _line(one: Letter) -> str:
    error = f": {one.error}" if one.error else ""
    again = one.state == "dead"
    state, then = ("released", ", and refused again") if again else (one.state, "")
    reason = f": {one.reason}" if one.reason else ""
    decided = f"  ({state} by {one.decided_by}{reason}{then})" if one.decided_by else ""
    return (
        f"{one.letter:6d}  {one.state:<9} {one.consumer:<12} {one.origin}  key {one.key!r}  {one.why}{error}{decided}"
    )
