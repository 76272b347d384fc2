"""Erasing a subject: destroy the key, remove what can be removed, read everything back, and say what is so.

In this order, each step durable before the next and harmless when repeated, so that a run which was killed anywhere is
finished by running it again (fault points `erasure.*`):
 1. erasure.requested on subjects.v1: whoever reads it takes nothing of theirs into a batch or a step any more;
 2. the key is destroyed, its mark first: from here nothing of theirs can be read or written by anybody;
 3. their objects are removed, older versions included, and what local stores hold;
 4. log, dead letters and objects are read back;
 5. erasure.done, with the report, once every store is done. Until then nothing claims that it is.

A log cannot forget: what was written before there was a key store, or by a foreign client in plain text, stays
readable, and is reported so with its coordinates.

Guarantee 9 (tests/GUARANTEES.md): test_privacy_erasure.py, test_privacy_cli.py, test_run_person.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from odradek.streams import topics
from odradek.streams.admin import existing
from odradek.streams.blobs import BlobStore
from odradek.streams.dlq import letter_of
from odradek.streams.envelope import CLAIM_HEADER, Event, Record, event_id, subject_of
from odradek.streams.errors import BlobMissing, KeyUnavailable, StreamError, UndecodableRecord
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import SessionOpened
from odradek.streams.events.subjects import ErasureDone, ErasureRequested
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.privacy import content
from odradek.streams.privacy.removal import Removal
from odradek.streams.privacy.report import ErasureReport, Exclusion, LocalStore, StoreReport
from odradek.streams.privacy.ring import FORMAT, OVERHEAD
from odradek.streams.replay.select import bodies
from odradek.streams.replay.sightings import seen

SOURCE = "erasure"
Say = Callable[[str], None]
NAMED = 5
"""Places that a report names; the rest is a number."""


@dataclass(slots=True)
class _Found:
    """What reading a topic back has shown."""

    encrypted: int = 0
    open: list[str] = field(default_factory=list)
    """Encrypted records that somebody can still open."""
    plain: list[str] = field(default_factory=list)
    undecodable: list[str] = field(default_factory=list)

    def report(self, store: str) -> StoreReport:
        left = [
            f"{len(places)} {what} ({', '.join(places[:NAMED])}{', …' if len(places) > NAMED else ''})"
            for what, places in (
                ("still open", self.open),
                ("in plain text, written without a key or by a foreign client", self.plain),
                ("of their sessions that nobody can decode", self.undecodable),
            )
            if places
        ]
        if left:
            return StoreReport(store=store, state="readable", detail="; ".join(left))
        if self.encrypted:
            return StoreReport(store=store, state="unreadable", detail=f"{self.encrypted} records without a key")
        return StoreReport(store=store, state="none")


class Erasure:
    """One run. Needs the deployment's key store (`EventLog.keys`); blobs None counts as an unreachable store."""

    def __init__(
        self,
        event_log: EventLog,
        blobs: BlobStore | None,
        local: Sequence[LocalStore] = (),
        say: Say = lambda _text: None,
    ) -> None:
        if event_log.keys is None:
            raise KeyUnavailable("erasing needs the deployment's key store (privacy.keys)")
        self._log, self._keys, self._blobs, self._local, self._say = event_log, event_log.keys, blobs, local, say
        self._sessions: set[str] = set()

    async def run(self, subject: str, reason: str = "") -> ErasureReport:
        """Everything; returns what is so now."""
        self._say("asking for it on the log")
        requested = await self._requested(subject)
        await reach("erasure.requested")
        self._say("destroying the key")
        first = await self._keys.destroy(subject, reason or "erasure requested")
        await reach("erasure.key_destroyed")
        self._say("removing objects")
        objects = await self._objects(subject)
        await reach("erasure.objects_removed")
        stores = [
            StoreReport(store="key", state="deleted", detail="and marked, so that none is made again"),
            *await self._read_back(subject),
            objects,
            StoreReport(store="tables", state="none", detail="they hold ids, numbers and versions only"),
            *[await store.erase(subject, frozenset(self._sessions)) for store in self._local],
        ]
        self._say("following their sessions to the weights")
        where = await seen(self._log, self._sessions)
        report = ErasureReport(
            subject=subject,
            request_id=_request_id(subject),
            requested_at=str(requested),
            first=first,
            sessions=len(self._sessions),
            stores=stores,
            exclusion=await self._exclusion(subject, requested.offset),
            batches=where.batches,
            versions=where.versions,
        )
        await reach("erasure.before_done")
        if report.done:
            await self._say_done(report)
        await reach("erasure.after_done")
        return report

    # -- the request -------------------------------------------------------------------------------------------

    async def _requested(self, subject: str) -> RecordRef:
        """The request on the log: the first there is, or ours. Readable by everybody on return."""
        async for record in self._log.read(topics.SUBJECTS.name, 0, await self._log.beginning(topics.SUBJECTS.name, 0)):
            if isinstance(body := _body(record), ErasureRequested) and body.subject == subject:
                return record.ref
        body = ErasureRequested(subject=subject, request_id=_request_id(subject))
        ref = await self._log.append(topics.SUBJECTS.name, subject, _event(body, subject, "requested"))
        await self._log.wait_stable(topics.SUBJECTS.name, 0, ref.offset + 1)
        return ref

    async def _say_done(self, report: ErasureReport) -> None:
        """erasure.done, once."""
        async for body in bodies(self._log, topics.SUBJECTS.name):
            if isinstance(body, ErasureDone) and body.subject == report.subject:
                return
        trained: dict[str, list[int]] = {}
        for one in report.versions:
            if one.how == "trained":
                trained.setdefault(one.policy, []).append(one.version)
        body = ErasureDone(
            subject=report.subject,
            request_id=report.request_id,
            stores={store.store: store.state for store in report.stores},
            batches=[batch.batch_id for batch in report.batches],
            versions=trained,
        )
        await self._log.append(topics.SUBJECTS.name, report.subject, _event(body, report.subject, "done"))

    # -- objects -----------------------------------------------------------------------------------------------

    async def _objects(self, subject: str) -> StoreReport:
        if self._blobs is None:
            return StoreReport(store="objects", state="unreachable", detail="no object store was given")
        try:
            removal = await self._blobs.remove(subject)
            return await self._left(self._blobs, removal, await self._blobs.of_subject(subject))
        except StreamError as error:
            return StoreReport(store="objects", state="unreachable", detail=f"{error}; run it again")

    async def _left(self, blobs: BlobStore, removal: Removal, left: list[str]) -> StoreReport:
        """What a locked bucket keeps is ciphertext without a key; looked at, because older objects were none."""
        plain = []
        for key in left:
            try:
                data = await blobs.store.get(key)
            except BlobMissing:
                continue
            if len(data) < OVERHEAD or data[:1] != FORMAT:
                plain.append(key)
        if plain:
            named = ", ".join(plain[:NAMED])
            return StoreReport(store="objects", state="readable", detail=f"{len(plain)} plain objects kept: {named}")
        kept = [f"{len(removal.kept)} kept by the store ({removal.kept[0]}), without a key"] if removal.kept else []
        detail = "; ".join([f"{removal.removed} removed", *kept])
        state: Any = "unreadable" if left or removal.kept else "deleted" if removal.removed else "none"
        return StoreReport(store="objects", state=state, detail=detail)

    # -- the log -----------------------------------------------------------------------------------------------

    async def _read_back(self, subject: str) -> list[StoreReport]:
        """Every topic that may hold content, sessions first: the others are recognised by their sessions."""
        rows = (topics.SESSIONS, topics.REWARDS, topics.FEEDBACK, topics.TASKS, topics.SUBJECTS, topics.DLQ)
        there = await existing(self._log.config)
        names = [name for row in rows for name in there if topics.declared(name) is row]
        reports = []
        for name in names:
            self._say(f"reading {name} back")
            found = _Found()
            for number, end in (await self._log.stable_ends(name)).items():
                start = await self._log.beginning(name, number)
                async for record in self._log.read(name, number, start, end):
                    self._look(subject, record, found)
            reports.append(found.report(name))
        return reports

    def _look(self, subject: str, record: Record, found: _Found) -> None:
        place = str(record.ref)
        if record.ref.topic == topics.DLQ.name and (letter := letter_of(record)) is not None:
            record = letter.record()
            record.keys = self._keys
        theirs = subject_of(record) == subject
        if record.ref.topic == topics.SESSIONS.name and not (theirs or record.key in self._sessions or _opens(record)):
            return
        try:
            event = record.event
        except UndecodableRecord:
            if any(name == CLAIM_HEADER for name, _ in record.headers):
                return  # its content was an object: that store says what became of it
            if theirs or record.key in self._sessions:
                found.undecodable.append(place)
            return
        if isinstance(event.body, SessionOpened) and event.meta.subject == subject:
            self._sessions.add(event.body.session_id)
        if theirs:
            found.encrypted += 1
            if event.meta.cipher is None:
                found.open.append(place)
            return
        named = event.meta.subject == subject or getattr(event.body, "session_id", record.key) in self._sessions
        if named and content.split(event.body) is not None:
            found.plain.append(place)

    # -- what is trained ---------------------------------------------------------------------------------------

    async def _exclusion(self, subject: str, requested: int) -> Exclusion:
        counts: Counter[str] = Counter()
        held: dict[str, list[str]] = {}
        broken: list[str] = []
        async for body in bodies(self._log, topics.BATCHES.name):
            match body:
                case BatchAssembled():
                    theirs = [member.session_id for member in body.members if member.subject == subject]
                    knew = body.subjects_offset > requested
                    counts["batches"] += knew
                    if theirs:
                        held[body.batch_id] = theirs
                        broken += [f"batch {body.batch_id}"] if knew else []
                case StepCompleted(batch_id=batch_id) if batch_id in held:
                    theirs = held.pop(batch_id)
                    if body.subjects_offset > requested:
                        counts["steps"] += 1
                        broken += [] if set(theirs) <= set(body.left_out) else [f"step {body.step} on {batch_id}"]
        return Exclusion(
            since=requested, batches=counts["batches"], steps=counts["steps"], pending=list(held), broken=broken
        )


def _request_id(subject: str) -> str:
    """A subject is erased once."""
    return event_id("erasure", subject)


def _event(body: ErasureRequested | ErasureDone, subject: str, step: str) -> Event[Any]:
    meta = Meta(origin="production", subject=subject, time_ms=int(time.time() * 1000))
    return Event.of(body, id=event_id("erasure", subject, step), source=SOURCE, meta=meta)


def _opens(record: Record) -> bool:
    tag = str(SessionOpened.__struct_config__.tag).encode()
    return any(name == "ce_type" and raw == tag for name, raw in record.headers)


def _body(record: Record) -> Any:
    try:
        return record.event.body
    except UndecodableRecord:
        return None
