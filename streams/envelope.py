"""An event as it travels: CloudEvents 1.0 binary mode in the headers, meta and body in the value.

Headers are bytes of unknown origin: a null value counts as absent, a value that is not UTF-8 is an error only where
this room needs the text, and everything it does not need is kept raw in `Event.extra`. Ids are deterministic, so that
writing a step twice writes the same id; they do not remove the duplicate, the fold does (first record of an id wins).
An event whose type the topic does not carry (`schemas/catalog.py`) is poison there, however well formed.
"""

import logging
import re
import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from odradek.streams import codec
from odradek.streams.errors import DecodeError, KeyUnavailable, StreamError, UnknownEventType
from odradek.streams.events.meta import BlobRef, Meta, RecordRef
from odradek.streams.privacy.content import ERASED, LOCKED, Reveal
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.schemas.catalog import CATALOG
from odradek.streams.topics import declared, tenant_of

log = logging.getLogger(__name__)
B = TypeVar("B")
Headers = tuple[tuple[str, bytes | None], ...]

SPEC_VERSION = "1.0"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "odradek:event")
SCHEMA_PREFIX = "odradek:schemas/"
TRACEPARENT = re.compile(r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
CLAIM_HEADER = "odradek_claim"
"""Marks a value that is a claim check: a BlobRef in msgpack instead of the event."""
SUBJECT_HEADER = "odradek_subject"
"""Whose content is encrypted in the record; readers fetch that key before anything is decoded."""
BOX_HEADER = "odradek_box"
"""A BlobRef in msgpack: the encrypted content is an object of its own, and the record holds the structure alone."""
LONGEST_KEY = 1024
"""Bytes of an object's address that S3 takes; ours are shorter and ASCII."""
_ADDRESS = re.compile(r"(?:(?!\.{1,2}/)[!-.0-~]+/)*blobs/(?!\.{1,2}/)[!-.0-~]+/[0-9a-f]{64}")
OWN_HEADERS = frozenset(
    [
        *("ce_id", "ce_type", "ce_source", "ce_specversion", "ce_dataschema", "content-type", "traceparent"),
        *(CLAIM_HEADER, SUBJECT_HEADER, BOX_HEADER),
    ]
)

CARRIED = {topic.name: kinds for topic, kinds in CATALOG.items()}
"""Event types by topic, by its name: a table's row is slow to hash for each record."""


def event_id(*parts: str | int) -> str:
    """The id of what a cause leads to at a step: UUIDv5, the same wherever and however often it is computed."""
    return str(uuid.uuid5(NAMESPACE, "\x1f".join(str(part) for part in parts)))


@dataclass(frozen=True, slots=True)
class Event(Generic[B]):
    """One event. Make one with `Event.of`; read one with `Record.event`."""

    id: str
    type: str
    source: str
    meta: Meta
    body: B
    traceparent: str | None = None
    extra: Headers = field(default=())
    """Headers that this room does not know, raw and in order."""

    @classmethod
    def of(
        cls, body: B, *, id: str, source: str, meta: Meta | None = None, traceparent: str | None = None
    ) -> "Event[B]":
        """An event about to be written; `id` comes from `event_id(cause, step)`."""
        return cls(
            id=id,
            type=codec.type_of(body),
            source=source,
            meta=meta if meta is not None else Meta(),
            body=body,
            traceparent=traceparent,
        )


def encode(event: Event[Any], content_type: str = codec.MSGPACK) -> tuple[bytes, Headers]:
    """Value and headers of an event."""
    headers: list[tuple[str, bytes | None]] = [
        ("ce_specversion", SPEC_VERSION.encode()),
        ("ce_id", event.id.encode()),
        ("ce_type", event.type.encode()),
        ("ce_source", event.source.encode()),
        ("ce_dataschema", f"{SCHEMA_PREFIX}{event.type}".encode()),
        ("content-type", content_type.encode()),
    ]
    if event.traceparent is not None:
        headers.append(("traceparent", event.traceparent.encode()))
    return codec.encode(event.body, event.meta, content_type), (*headers, *event.extra)


def decode(value: bytes | None, headers: Headers, ref: RecordRef, reveal: Reveal | None = None) -> Event[Any]:
    """The event of a record; raises `DecodeError` (poison) or `UnknownEventType` (upgrade), with the coordinates."""
    try:
        return _decode(value, headers, ref, reveal)
    except UnknownEventType as error:
        raise UnknownEventType.at(str(error), ref.topic, ref.partition, ref.offset, **error.coordinates) from None
    except DecodeError as error:
        raise DecodeError.at(str(error), ref.topic, ref.partition, ref.offset, **error.coordinates) from None


def _decode(value: bytes | None, headers: Headers, ref: RecordRef, reveal: Reveal | None) -> Event[Any]:
    first: dict[str, bytes] = {}
    for name, raw in headers:
        if raw is not None and name.lower() in OWN_HEADERS:
            first.setdefault(name.lower(), raw)
    topic = declared(ref.topic)
    event_type = _text(first, "ce_type")
    if event_type is None:
        raise DecodeError("the record has no ce_type header")
    content_type = _content_type(first, value, open_topic=topic.open)
    meta, body = codec.decode(value, event_type, content_type, reveal)
    if not isinstance(body, CARRIED[topic.name]):
        # Whoever reads a topic handles its own types: a good event of another topic is as foreign here as garbage.
        raise DecodeError(f"an event of type {codec.type_of(body)} does not belong on {topic.name}")
    if topic.open:
        meta = msgspec.structs.replace(meta, tenant=tenant_of(ref.topic) or "default")
    traceparent = _lenient(first.get("traceparent"))
    return Event(
        id=_text(first, "ce_id") or event_id("unnamed", ref.topic, ref.partition, ref.offset),
        type=codec.type_of(body),
        source=_text(first, "ce_source") or "unknown",
        meta=meta,
        body=body,
        traceparent=traceparent if traceparent and TRACEPARENT.match(traceparent) else None,
        extra=tuple((name, raw) for name, raw in headers if name.lower() not in OWN_HEADERS),
    )


def _content_type(first: dict[str, bytes], value: bytes | None, *, open_topic: bool) -> str:
    """msgpack, or JSON where foreign clients write; there a missing header is settled by the first byte."""
    named = _text(first, "content-type")
    if named is None:
        return codec.JSON if open_topic and value is not None and value[:1] == b"{" else codec.MSGPACK
    bare = named.split(";")[0].strip().lower()
    if bare == codec.MSGPACK or (bare == codec.JSON and open_topic):
        return bare
    raise DecodeError(f"content-type {bare[:80]!r} is not accepted here: expected {codec.MSGPACK}")


def _text(first: dict[str, bytes], name: str) -> str | None:
    raw = first.get(name)
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DecodeError(f"header {name} is not UTF-8 ({len(raw)} bytes)") from None


def _lenient(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("ascii", "replace")


@dataclass(slots=True)
class Record:
    """One stored record: its coordinates, its raw bytes and, once asked for, its event."""

    ref: RecordRef
    """Topic without deployment prefix."""
    key_bytes: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    """The broker's record time, which `offsets_for_time` searches; event time is in the meta."""
    content: bytes | None = None
    """The value that a claim check stands for, fetched and verified; None where the value is the event itself."""
    fault: StreamError | None = None
    """Why a claim check could not be redeemed, for ever: raised by `event`."""
    keys: KeyRing | None = None
    """What opens encrypted content; the record's own key has been read when the record is handed out."""
    box: bytes | None = None
    """The encrypted content where it is an object of its own, fetched and verified."""
    raw_names: tuple[bytes, ...] | None = None
    """Header names as they are stored, where one of them is not UTF-8 and `headers` shows it escaped."""
    _event: Event[Any] | None = None

    @property
    def key(self) -> str | None:
        """The key as text; bytes that are not UTF-8 are shown escaped and equal no key of ours."""
        return None if self.key_bytes is None else self.key_bytes.decode("utf-8", "backslashreplace")

    @property
    def event(self) -> Event[Any]:
        """The decoded event (cached); raises `DecodeError` or `UnknownEventType`."""
        if self.fault is not None:
            raise self.fault
        if self._event is None:
            if self.content is None and claim_of(self) is not None:
                raise DecodeError.at(
                    "the value is a claim check and this reader has no blob store",
                    self.ref.topic,
                    self.ref.partition,
                    self.ref.offset,
                )
            value = self.content if self.content is not None else self.value
            self._event = decode(value, self.headers, self.ref, self._reveal)
        return self._event

    def _reveal(self, meta: Meta) -> bytes | str:
        """The encrypted content, or why it cannot be seen here. An erased subject is no error of the record's."""
        keys, subject = self.keys, meta.subject
        if keys is None:
            return LOCKED
        key = keys.held(subject)
        if key is None:
            return ERASED if keys.erased(subject) else LOCKED
        assert meta.cipher is not None
        box = meta.cipher.box or self.box
        if box is None:
            raise DecodeError(f"the content of subject {subject!r} is an object, and this reader has no blob store")
        first = {name: raw or b"" for name, raw in reversed(self.headers)}
        place = place_of(
            self.ref.topic, self.key_bytes or b"", first.get("ce_id", b""), first.get("ce_type", b""), subject
        )
        try:
            return key.decrypt(box, place)
        except KeyUnavailable as error:
            log.warning("%s: %s", self.ref, error)
            return LOCKED


def place_of(topic: str, key: bytes, identifier: bytes, event_type: bytes, subject: str) -> bytes:
    """What encrypted content is bound to: moved to any other record, it does not open."""
    return msgspec.msgpack.encode(("record", topic, key, identifier, event_type, subject))


def claimed(headers: Headers, ref: BlobRef) -> tuple[bytes, Headers]:
    """Value and headers of a record whose real value lies in the blob store."""
    return msgspec.msgpack.encode(ref), (*headers, (CLAIM_HEADER, b"1"))


def claim_of(record: Record) -> BlobRef | None:
    """The claim check in a record's value, if it is one."""
    if not any(name == CLAIM_HEADER for name, _ in record.headers):
        return None
    return _reference(record, record.value)


def subject_of(record: Record) -> str | None:
    """Whose content is encrypted in the record; None where nothing is."""
    raw = next((raw for name, raw in record.headers if name == SUBJECT_HEADER), None)
    return None if raw is None else raw.decode("utf-8", "backslashreplace")


def box_of(record: Record) -> BlobRef | None:
    """Where the record's encrypted content lies, if it is an object of its own."""
    raw = next((raw for name, raw in record.headers if name == BOX_HEADER), None)
    return None if raw is None else _reference(record, raw)


def _reference(record: Record, raw: bytes | None) -> BlobRef:
    """Refuses what no writer of ours makes: a store that says no to an odd address looks like an outage of ours, and
    any client can write to an open topic."""
    try:
        ref = msgspec.msgpack.decode(raw or b"", type=BlobRef)
    except (msgspec.DecodeError, RecursionError):
        ref = None
    if ref is None or not (len(ref.key) <= LONGEST_KEY and _ADDRESS.fullmatch(ref.key)):
        at = record.ref
        raise DecodeError.at("the claim check cannot be read", at.topic, at.partition, at.offset)
    return ref
