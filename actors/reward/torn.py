"""Ends sessions that have a record nobody can read.

Such a session has its verdict (ungraded) at once, and by that its group goes on without it: no controller places it
again. One whose host is down would so never end, and its sandbox stay. So each round, until its end is on the log, its
host is told to stop it and is handed it to be ended, as a session of a closed group is. Which sessions those are is a
fold of the dead letters, so a restarted grader goes on with it.

Waits: for a host's answer (`HOST_S`); one that does not answer is asked in the next round. People's sessions are
theirs to resume; what a newer release wrote is left alone. tests/contract/test_torn_sessions.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray.exceptions

from odradek.actors.controller.placement import host_of
from odradek.actors.reward.opening import opening
from odradek.actors.runtime.deployment import Deployment, actor_handle
from odradek.actors.session.owned import SessionSpec
from odradek.actors.session.ports import WorkspaceStart
from odradek.streams import topics
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.envelope import Event
from odradek.streams.errors import DecodeError, Retryable, UnknownEventType
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import CancelRequested, SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.ownership import OwnerRule

log = logging.getLogger(__name__)

ROUND_S = 2.0
"""Seconds between rounds. Too few: requests. Too many: a session that nobody wants runs on."""
HOST_S = 10.0
"""Seconds a session actor may take to answer. Too few: a busy one is asked again and again."""


class TornSessions:
    """Of the letters of one consumer of sessions.v1."""

    def __init__(self, event_log: EventLog, deployment: Deployment, consumer: str) -> None:
        self._log = event_log
        self._deployment = deployment
        self._letters = DeadLetters(event_log, consumer)
        self._found: dict[bytes, RecordRef] = {}
        """By session its first record that nobody can read."""
        self._settled: set[bytes] = set()
        """Of those: ended, or for nobody here to end."""
        self._told: set[str] = set()
        """Told to stop where it ran, or handed over with that."""

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.round()
            await asyncio.sleep(ROUND_S)

    async def round(self) -> None:
        """One look at the letters, one try for each session that has not ended."""
        try:
            letters = await self._letters.letters()
        except Retryable as error:
            log.warning("torn sessions: %s; looking again", error)
            return
        for letter in letters:
            if letter.origin.topic == topics.SESSIONS.name and letter.why == Why.DECODE and letter.key:
                self._found.setdefault(letter.key, letter.origin)
        for key in self._found.keys() - self._settled:
            try:
                if await self._settle(key, self._found[key]):
                    self._settled.add(key)
            except (Retryable, ray.exceptions.RayError, TimeoutError, ValueError) as error:
                log.warning("session %r has not ended: %s: %s; asking again", key, type(error).__name__, error)

    async def _settle(self, key: bytes, torn: RecordRef) -> bool:
        """Whether nothing is left to do; asks for the session's end otherwise."""
        try:
            found = await opening(self._log, key, torn.partition, torn.offset)
            if found is None or found[1].meta.origin == "production":
                return True
            if await self._ended(key.decode(), found[0].offset):
                return True
        except UnknownEventType:
            return True
        began, event = found
        spec = _spec(event, began, f"a record of it can't be read: {torn}")
        session, index = spec.session_id, host_of(spec.session_id, self._deployment.session_actors)
        host: Any = actor_handle(f"session-{index}", self._deployment.namespace)
        async with asyncio.timeout(HOST_S):
            if session not in self._told:
                await host.post.remote(session, CancelRequested(request_id=f"torn:{session}", reason=spec.cancelled))
            await host.open.remote([spec])  # does nothing where it runs
        self._told.add(session)
        return False

    async def _ended(self, session: str, start: int) -> bool:
        rule = OwnerRule()
        async for record in self._log.read_key(topics.SESSIONS.name, session, start=start):
            try:
                rule.accepts(record.ref.offset, record.event.id, record.event.meta, record.event.body)
            except DecodeError:
                continue
        return rule.ended


def _spec(event: Event[SessionOpened], began: RecordRef, why: str) -> SessionSpec:
    """To be ended: nothing of it is sampled or run any more, so it needs no files and no message."""
    opened, meta = event.body, event.meta
    return SessionSpec(
        opened=opened,
        message="",
        start=WorkspaceStart(image=opened.image, files={}, setup=opened.setup, files_ref=opened.files_ref),
        origin=meta.origin,
        tenant=meta.tenant,
        subject=meta.subject,
        correlation=meta.correlation,
        history_floor=began.offset,
        cancelled=why,
    )
