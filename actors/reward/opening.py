"""Where a session began, found from any of its records: for what is said of a session from outside its log."""

from __future__ import annotations

from odradek.streams import topics
from odradek.streams.envelope import Event, Record
from odradek.streams.errors import DecodeError
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import SessionCompleted, SessionEvent, SessionFailed, SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.lookback import newest

WITHIN = 200_000
"""Records of one partition that are looked through backwards. Too few: the beginning of a long session on a busy log is
not found. Too many: a record with a key that no session has costs a long read."""


async def opening(
    event_log: EventLog, session: bytes, partition: int, end: int
) -> tuple[RecordRef, Event[SessionOpened]] | None:
    """The session's opening before `end`; None for a key that no session within reach has."""
    found = await _newest(event_log, session, partition, (SessionOpened,), end)
    return None if found is None else (found.ref, found.event)


async def ending(event_log: EventLog, session: str) -> Record | None:
    """The newest record that says the session ended; None for one that has not, or that nobody knows."""
    partition = topics.SESSIONS.partition_of(session)
    end = await event_log.stable_end(topics.SESSIONS.name, partition)
    return await _newest(event_log, session.encode(), partition, (SessionCompleted, SessionFailed), end)


async def _newest(
    event_log: EventLog, session: bytes, partition: int, kinds: tuple[type[SessionEvent], ...], end: int
) -> Record | None:
    def wanted(record: Record) -> bool:
        if record.key_bytes != session:
            return False
        try:
            return isinstance(record.event.body, kinds)
        except DecodeError:
            return False

    return await newest(event_log, topics.SESSIONS.name, partition, wanted, end=end, within=WITHIN)
