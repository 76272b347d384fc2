"""`odradek subject`: consent, by subject. Needs only the broker."""

from __future__ import annotations

import time
from typing import Any

import click

from odradek.infra.cli.context import EXIT_CODES, Context, command_options
from odradek.infra.cli.log import Say, opened_log, run


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Consent to train on what a subject's production sessions hold."""


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


def _say(context: Context, subject: str, *, granted: bool, reason: str) -> None:
    if not subject.strip():
        raise click.UsageError("a subject has a name")

    async def work(_tell: Say) -> Any:
        from odradek.streams import topics
        from odradek.streams.envelope import Event, event_id
        from odradek.streams.events.meta import Meta
        from odradek.streams.events.subjects import ConsentGranted, ConsentWithdrawn

        async with opened_log(context, create=True) as event_log:
            body = ConsentGranted(subject=subject) if granted else ConsentWithdrawn(subject=subject, reason=reason)
            seen = await event_log.stable_end(topics.SUBJECTS.name, 0)
            identifier = event_id("consent", subject, str(granted), seen)
            meta = Meta(origin="production", subject=subject, time_ms=int(time.time() * 1000))
            event = Event.of(body, id=identifier, source="odradek-cli", meta=meta)
            return await event_log.append(topics.SUBJECTS.name, subject, event)

    ref = run(context, "writing consent", work)
    what = "granted" if granted else "withdrawn"
    context.result({"subject": subject, "consent": granted, "at": ref}, f"consent of {subject} {what} at {ref}")
