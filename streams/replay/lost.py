"""Objects that the log names and the store has not: what a store that was restored to an earlier moment lost.

Looks at claim checks, at encrypted content that is an object of its own, at starting workspaces and at large files of
workspace changes, on every kept topic. What is gone because its subject was erased is not lost. Writes nothing; that an
object is there says nothing of its bytes, which every reader verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Literal

import msgspec

from odradek.streams import topics
from odradek.streams.admin import existing
from odradek.streams.blobs import ObjectStore
from odradek.streams.envelope import Record, box_of, claim_of
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.sessions import SessionOpened, ToolCompleted
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.topics import Cleanup

What = Literal["record", "files"]
"""record: the record cannot be read without it, nor its session be trained on; files: a workspace cannot be made."""

NAMING = frozenset(str(kind.__struct_config__.tag).encode() for kind in (SessionOpened, ToolCompleted, TaskPublished))
"""Types whose bodies name objects; others are not decoded."""

OBJECTS = "blobs/"


class LostObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object, at the first record that names it."""

    key: str
    what: What
    at: str
    record_key: str
    """Of that record: on sessions.v1 the session."""


def references(record: Record) -> Iterator[tuple[What, BlobRef]]:
    """The objects that a record names, as far as this reader can see."""
    try:
        if (claim := claim_of(record)) is not None:
            yield "record", claim
            return
        if (box := box_of(record)) is not None:
            yield "record", box
            return
        if not any(name == "ce_type" and raw in NAMING for name, raw in record.headers):
            return
        body = record.event.body
    except UndecodableRecord:
        return
    refs: list[BlobRef | None] = []
    match body:
        case SessionOpened() | TaskPublished():
            refs = [body.files_ref]
        case ToolCompleted() if body.delta is not None:
            refs = [change.ref for change in body.delta.changes]
        case _:
            pass
    yield from (("files", ref) for ref in refs if ref is not None)


async def lost_objects(
    event_log: EventLog, store: ObjectStore, say: Callable[[str], None] = lambda _text: None
) -> list[LostObject]:
    """Every object that is not there, in the order in which the log names them."""
    there = frozenset(await store.list(OBJECTS))
    known: set[str] = set()
    found: list[LostObject] = []
    for topic in await existing(event_log.config):
        if topics.declared(topic).cleanup is not Cleanup.KEEP:
            continue
        for number, end in sorted((await event_log.stable_ends(topic)).items()):
            say(f"{topic}/{number}, {len(found)} objects lost")
            start = await event_log.beginning(topic, number)
            async with aclosing(event_log.read(topic, number, start, end)) as records:
                async for record in records:
                    for what, ref in references(record):
                        if ref.key in known or ref.key in there:
                            continue
                        known.add(ref.key)
                        if not _erased(event_log, ref) and not await store.exists(ref.key):
                            place = str(record.ref)
                            found.append(LostObject(key=ref.key, what=what, at=place, record_key=record.key or ""))
    return found


def _erased(event_log: EventLog, ref: BlobRef) -> bool:
    return bool(ref.subject) and event_log.keys is not None and event_log.keys.erased(ref.subject)
