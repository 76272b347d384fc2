"""The session's log over a real broker (actors/session/clients.py): what an owner reads back of what was appended."""

from __future__ import annotations

import uuid

import pytest
from support.lane_world import TURN_HEADERS

from odradek.actors.session.clients import TOPIC, KafkaJournal
from odradek.actors.session.errors import SessionInfraFailure
from odradek.actors.session.ports import Outgoing
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import MessageReceived, SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.testing import event_log, kafka_config

__all__ = ["event_log", "kafka_config"]
pytestmark = pytest.mark.contract


async def opened(journal: KafkaJournal, session: str) -> RecordRef:
    body = SessionOpened(session_id=session, policy="demo")
    (ref,) = await journal.append(session, [Outgoing(str(uuid.uuid4()), Meta(), body)])
    return ref


async def said(journal: KafkaJournal, session: str, text: str) -> RecordRef:
    body = MessageReceived(message_id=text, text=text)
    (ref,) = await journal.append(session, [Outgoing(str(uuid.uuid4()), Meta(), body)])
    return ref


async def test_a_restarted_host_reads_each_session_from_its_own_start_and_no_other(event_log: EventLog) -> None:
    """Many sessions share a partition; a record that can't be decoded is left out and hides nothing."""
    journal = KafkaJournal(event_log, "test")
    sessions = [str(uuid.uuid4()) for _ in range(40)]
    first = {session: await opened(journal, session) for session in sessions}
    for number in range(3):
        for session in sessions:
            await said(journal, session, f"{session} {number}")
    await event_log.append_raw(TOPIC, sessions[0].encode(), b"\xc1", TURN_HEADERS)
    late = await said(journal, sessions[0], "after the damage")
    wanted = sessions[:30]
    found = await journal.read_many({session: first[session].offset for session in wanted})
    assert sorted(found) == sorted(wanted)
    for session in wanted:
        texts = [body.text for *_, body in found[session] if isinstance(body, MessageReceived)]
        assert texts[:3] == [f"{session} {number}" for number in range(3)]
        assert found[session] == await journal.read(session, first[session].offset)
    assert found[sessions[0]][-1][0] == late.offset
    tail = await journal.read(sessions[0], late.offset)
    assert [offset for offset, *_ in tail] == [late.offset]
    assert await journal.read(sessions[0], first[sessions[0]].offset, late.offset) == found[sessions[0]][:-1]


async def test_a_parent_is_read_from_the_record_that_opened_it(event_log: EventLog) -> None:
    journal = KafkaJournal(event_log, "test")
    session = str(uuid.uuid4())
    ref = await opened(journal, session)
    message = await said(journal, session, "x")
    assert [offset for offset, *_ in await journal.session_at(ref)] == [ref.offset, message.offset]
    with pytest.raises(SessionInfraFailure, match="opens no session, it holds MessageReceived"):
        await journal.session_at(message)
