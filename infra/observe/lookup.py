"""One session by its id, or by the beginning of it that no other has: all that the log holds of it."""

from __future__ import annotations

from collections.abc import Sequence

from odradek.infra.errors import UsageError
from odradek.streams import topics
from odradek.streams.errors import UndecodableRecord
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord


async def read_session(event_log: EventLog, wanted: str) -> tuple[str, list[SessionRecord]]:
    """The session's whole id and its records in log order; `UsageError` if there is none, or several begin so."""
    records = await _records(event_log, wanted)
    if records:
        return wanted, records
    session_id = await _completed(event_log, wanted)
    return session_id, await _records(event_log, session_id)


async def session_ids(event_log: EventLog, wanted: Sequence[str]) -> list[str]:
    """The whole id of each; `UsageError` as in `read_session`."""
    return [(await read_session(event_log, one))[0] for one in wanted]


async def _records(event_log: EventLog, session_id: str) -> list[SessionRecord]:
    records: list[SessionRecord] = []
    partition = topics.SESSIONS.partition_of(session_id)
    start = await event_log.beginning(topics.SESSIONS.name, partition)
    async for record in event_log.read_key(topics.SESSIONS.name, session_id, start=start):
        try:
            records.append((record.ref.offset, record.event.id, record.event.meta, record.event.body))
        except UndecodableRecord:
            continue  # `dlq list` shows it; the rest of the session is still worth reading
    return records


async def _completed(event_log: EventLog, prefix: str) -> str:
    """The one session id that begins so."""
    found: set[str] = set()
    for partition, end in (await event_log.stable_ends(topics.SESSIONS.name)).items():
        start = await event_log.beginning(topics.SESSIONS.name, partition)
        async for record in event_log.read(topics.SESSIONS.name, partition, start, end):
            if (record.key or "").startswith(prefix):
                found.add(record.key or "")
    if len(found) == 1:
        return found.pop()
    if found:
        raise UsageError(f"{len(found)} sessions begin with {prefix!r}: {', '.join(sorted(found)[:3])}, …")
    raise UsageError(f"no session {prefix!r} on the log; `odradek session list` shows what there is")
