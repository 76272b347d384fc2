"""What a person says, as events: feedback on a session, and consent to train on their sessions.

Consent is a standing grant of a subject (DESIGN §8): given once, it covers the subject's sessions until withdrawn.
"""

from __future__ import annotations

import time
from typing import Literal

from odradek.streams import topics
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.subjects import ConsentGranted, ConsentWithdrawn
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents

SOURCE = "odradek-run"
Verdict = Literal["accepted", "rejected"]


def _meta(subject: str, session_id: str, key: str) -> Meta:
    return Meta(
        origin="production",
        subject=subject,
        correlation=session_id,
        idempotency_key=key,
        time_ms=int(time.time() * 1000),
    )


async def give_feedback(
    event_log: EventLog, session_id: str, subject: str, verdict: Verdict, comment: str = ""
) -> RecordRef:
    """The person's answer; the same answer twice is one event."""
    body = FeedbackGiven(session_id=session_id, verdict=verdict, comment=comment)
    meta = _meta(subject, session_id, f"{session_id}/{verdict}")
    event = Event.of(body, id=event_id("feedback", session_id, verdict), source=SOURCE, meta=meta)
    return await event_log.append(topics.FEEDBACK.name, session_id, event)


async def set_consent(event_log: EventLog, session_id: str, subject: str, given: bool) -> None:
    """Grant or withdraw the subject's consent to train. `session_id`: of the run in which it was said."""
    body = ConsentGranted(subject=subject) if given else ConsentWithdrawn(subject=subject, reason="odradek run")
    identifier = event_id("consent", subject, session_id, str(given))
    event = Event.of(body, id=identifier, source=SOURCE, meta=_meta(subject, session_id, identifier))
    await event_log.append(topics.SUBJECTS.name, subject, event)


async def consent_stands(event_log: EventLog, subject: str) -> bool:
    """Whether the subject's sessions may be trained on now."""
    consents = Consents()
    consents.offset = await event_log.beginning(topics.SUBJECTS.name, 0)
    await consents.refresh(event_log)
    return consents(subject)
