"""`odradek subject`: consent and erasure, by subject. Consent needs only the broker, erasure the object store too."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.actors.tools.text import show_name
from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_CODES, CaseFailed, Context, command_options
from odradek.infra.cli.log import Say, broker, opened_log, run
from odradek.infra.errors import InfraError, UsageError

if TYPE_CHECKING:
    from odradek.streams.privacy.report import ErasureReport


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Consent to train on what a subject's production sessions hold, and its erasure."""


@command.group
def consent() -> None:
    """Grant, withdraw or show a subject's consent. Without a standing grant nothing of a subject is trained on."""


@consent.command
@click.argument("subject")
@command_options
def grant(context: Context, subject: str) -> None:
    """From here on batches may hold SUBJECT's production sessions."""
    _say(context, subject, granted=True, reason="")


@consent.command
@click.argument("subject")
@click.option("--reason", default="", help="Kept with the event.")
@command_options
def withdraw(context: Context, subject: str, reason: str) -> None:
    """From here on SUBJECT's sessions enter no batch, and get zero weight in batches not trained yet.

    What has been trained stays trained: `odradek weights explain` names the versions.
    """
    _say(context, subject, granted=False, reason=reason)


@consent.command
@click.argument("subject")
@command_options
def show(context: Context, subject: str) -> None:
    """Whether SUBJECT's consent to train stands now."""

    async def work(_tell: Say) -> bool:
        from odradek.streams.privacy.consent import Consents

        async with opened_log(context) as event_log:
            consents = Consents()
            await consents.refresh(event_log)
            return consents(subject)

    stands = run(context, "reading consents", work)
    context.result({"subject": subject, "consent": stands}, f"{subject}: {'granted' if stands else 'not granted'}")


@command.command
@click.argument("subject")
@click.option("--reason", default="", help="Kept with the mark in the key store, on this host only.")
@click.option(
    "--gone",
    multiple=True,
    type=click.Path(path_type=Path),
    help="An exported file that is not where it was written, and of which no copy is left; repeatable.",
)
@click.option("--yes", is_flag=True, help="Erase without asking; needed where there is no terminal.")
@command_options
def erase(context: Context, subject: str, reason: str, gone: tuple[Path, ...], yes: bool) -> None:
    """Destroy SUBJECT's key, for ever: everything of theirs on the log, in dead letters and in the object store becomes
    unreadable, nothing more of them can be written, and no later batch or step takes anything of theirs.

    Asks first. Prints store by store what is left, and the batches and weight versions that saw their sessions: weights
    do not forget. Run it again after an interruption, or until all is done. Exit code 1 while anything readable is left
    or could not be looked at, and when you answer no.
    """
    if not subject.strip():
        raise click.UsageError("a subject has a name")
    if not yes and (context.as_json or not sys.stdin.isatty()):
        raise UsageError("this cannot be undone, and there is no terminal to ask on: say --yes")
    broker(context.config)  # a deployment that does not run is said before anything is asked
    question = f"Destroy the key of {show_name(subject)} for ever? What they said can't be read by anybody after that."
    if not yes and not click.confirm(question, err=True):
        raise CaseFailed(f"nothing was erased of {subject}")
    report = run(context, f"erasing {subject}", lambda tell: _erase(context, subject, reason, gone, tell))
    context.result({**msgspec.to_builtins(report), "done": report.done}, _erased(report))
    if not report.done:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


async def _erase(context: Context, subject: str, reason: str, gone: tuple[Path, ...], tell: Say) -> ErasureReport:
    from odradek.actors.runtime.store import blobs_of
    from odradek.infra.cli.exports import ExportedFiles, note
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import data_dir, endpoints
    from odradek.streams.privacy.erasure import Erasure

    data = data_dir(context.config)
    for path in gone:
        note(data, path, path.suffix.lstrip("."), gone=True)
    try:
        blobs = blobs_of(deployment_of(context.config, endpoints(context.config, ray=False)))
    except InfraError as error:
        context.say(f"going on without the object store: {error}")
        blobs = None
    async with opened_log(context, create=True) as event_log:
        return await Erasure(event_log, blobs, [ExportedFiles(data)], tell).run(subject, reason)


def _erased(report: ErasureReport) -> str:
    lines = [f"{report.subject}: {'erased' if report.done else 'NOT all done'} (asked for at {report.requested_at})"]
    lines += [f"  {one.store:<12} {one.state:<11} {one.detail}".rstrip() for one in report.stores]
    exclusion = report.exclusion
    lines.append(f"  since then   {exclusion.batches} batches, {exclusion.steps} steps on batches that held them")
    lines += [f"  pending      batch {batch}: zero weight when it is trained" for batch in exclusion.pending]
    lines += [f"  BROKEN       {what} took theirs all the same" for what in exclusion.broken]
    lines.append(f"{report.sessions} sessions, in {len(report.batches)} batches")
    for how in ("trained", "inherited"):
        versions = [f"{one.policy} {one.version}" for one in report.versions if one.how == how]
        if versions:
            lines.append(f"weights {how} from them, which do not forget: {', '.join(versions)}")
    if not report.sessions:
        lines.append("no session of theirs is on the log: is the id right? `odradek session show ID` names a session's")
    return "\n".join(lines)


def _say(context: Context, subject: str, *, granted: bool, reason: str) -> None:
    if not subject.strip():
        raise click.UsageError("a subject has a name")

    async def work(_tell: Say) -> Any:
        from odradek.streams import topics
        from odradek.streams.envelope import Event, event_id
        from odradek.streams.events.meta import Meta
        from odradek.streams.events.subjects import ConsentGranted, ConsentWithdrawn

        async with opened_log(context, create=True) as event_log:
            if granted and event_log.keys is not None and event_log.keys.erased(subject):
                raise CaseFailed(f"subject {subject!r} was erased, for ever: a consent would be of no effect")
            body = ConsentGranted(subject=subject) if granted else ConsentWithdrawn(subject=subject, reason=reason)
            seen = await event_log.stable_end(topics.SUBJECTS.name, 0)
            identifier = event_id("consent", subject, str(granted), seen)
            meta = Meta(origin="production", subject=subject, time_ms=int(time.time() * 1000))
            event = Event.of(body, id=identifier, source="odradek-cli", meta=meta)
            return await event_log.append(topics.SUBJECTS.name, subject, event)

    ref = run(context, "writing consent", work)
    what = "granted" if granted else "withdrawn"
    context.result({"subject": subject, "consent": granted, "at": ref}, f"consent of {subject} {what} at {ref}")
