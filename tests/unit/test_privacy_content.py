"""What is encrypted of an event, that its record holds nothing of it, and how it is read with and without the key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from odradek.streams import codec, topics
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.codec import INLINE_LIMIT, UPCASTERS, f32, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetter
from odradek.streams.envelope import (
    BOX_HEADER,
    CLAIM_HEADER,
    LONGEST_KEY,
    SUBJECT_HEADER,
    Event,
    Headers,
    Record,
    encode,
)
from odradek.streams.errors import BlobMissing, DecodeError, SubjectErased, Terminal
from odradek.streams.events.meta import BlobRef, Cipher, Meta, RecordRef
from odradek.streams.events.sessions import MessageReceived, SessionFailed, ToolCompleted, TurnSampled, WeightSpan
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.polling import Poller
from odradek.streams.privacy.content import CONTENT, ERASED, LOCKED
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.schemas import golden
from odradek.streams.schemas.catalog import CATALOG

SOMEBODYS = (topics.SESSIONS, topics.REWARDS, topics.FEEDBACK, topics.SUBJECTS)
STRUCTURE = {
    "session.opened.v1": {"session_id", "policy", "group_id", "lane", "task", "image", "template", "tokenizer"}
    | {"files_ref", "sampling", "budget", "forked_from", "condense"},
    "session.resumed.v1": {"session_id", "reason"},  # the product's own words
    "environment.opened.v1": {"sandbox_id", "driver", "image_digest"},
    "environment.closed.v1": {"sandbox_id"},
    "message.received.v1": {"message_id", "role"},
    "cancel.requested.v1": {"request_id"},
    "turn.sampled.v1": {"spans", "numerics_id", "finish_reason", "messages", "purpose", "copied_from"},
    "tool.requested.v1": {"call_id", "effect"},
    "tool.completed.v1": {"call_id"},
    "context.summarized.v1": {"source", "reason"},  # one of four words
    "session.completed.v1": {"reason", "usage", "group_id"},
    "session.failed.v1": {"group_id"},
    "reward.assigned.v1": {"session_id", "group_id", "grader", "grader_version", "components"},
    "reward.ungraded.v1": {"session_id", "group_id", "grader", "grader_version"},
    "reward.revised.v1": {"session_id", "group_id", "grader", "grader_version", "components", "revises"},
    "feedback.given.v1": {"session_id", "verdict"},
    "consent.granted.v1": {"subject", "scope"},
    "consent.withdrawn.v1": {"subject", "scope"},
    "erasure.requested.v1": {"subject", "request_id"},
    "erasure.done.v1": {"subject", "request_id", "stores", "batches", "versions"},
}
"""Fields that could hold text and are not encrypted: decided one by one."""

TOPIC, KEY, SUBJECT = "sessions.v1", "s-1", "ann"
SECRET = "the plaintext marker"


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(KeyFiles(tmp_path / "keys"))


def log_with(ring: KeyRing | None, blobs: BlobStore | None = None) -> EventLog:
    """Encodes as a writer does; never connects."""
    return EventLog(KafkaConfig(bootstrap="127.0.0.1:9"), blobs, ring)


async def written(log: EventLog, body: Any, *, topic: str = TOPIC, subject: str = SUBJECT, id: str = "e-1") -> Record:
    meta = Meta(origin="production", subject=subject, seq=3, epoch=7, correlation="c")
    event = Event.of(body, id=id, source="test", meta=meta)
    value, headers = await log.encoded(topic, KEY, event)
    return Record(RecordRef(topic, 0, 5), KEY.encode(), value, headers, 0)


async def read(record: Record, ring: KeyRing | None, blobs: BlobStore | None = None) -> Event[Any]:
    fresh = Record(record.ref, record.key_bytes, record.value, record.headers, 0)
    (found,) = await Poller(KafkaConfig(bootstrap="127.0.0.1:9"), blobs, ring).redeemed([fresh])
    return found.event


def turn() -> TurnSampled:
    return TurnSampled(
        turn=2, position=40, prompt=i32([5, 6, 7]), completion=i32([1, 2]), logprobs=f32([-0.5, -1.5]),
        spans=[WeightSpan(0, 4)], numerics_id="n", finish_reason="stop", messages=["0"],
    )  # fmt: skip


# -- what is decided --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for topic in SOMEBODYS for kind in CATALOG[topic]])
def test_every_field_that_could_hold_text_was_decided_on(kind: type[msgspec.Struct]) -> None:
    """A new field stands in `CONTENT` (encrypted) or above (structure); neither is a decision that nobody took."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    plain = (inspect.IntType, inspect.FloatType, inspect.BoolType, inspect.NoneType)

    def may_hold_text(field: inspect.Type) -> bool:
        return not isinstance(field, plain) and not (
            isinstance(field, inspect.UnionType) and all(isinstance(one, plain) for one in field.types)
        )

    open_to_text = {field.name for field in described.fields if may_hold_text(field.type)}
    decided = set(CONTENT.get(kind, ())) | STRUCTURE[str(described.tag)]
    assert open_to_text - decided == set(), "decide: content of a person, or structure?"
    assert not set(CONTENT.get(kind, ())) & STRUCTURE[str(described.tag)]


@pytest.mark.parametrize("kind", CONTENT, ids=lambda kind: kind.__name__)
async def test_every_type_with_content_survives_encryption_and_keeps_its_shape_without_the_key(
    ring: KeyRing, kind: type[msgspec.Struct]
) -> None:
    topic = next(topic.name for topic, kinds in CATALOG.items() if kind in kinds)
    body = golden.samples(kind)["full"]
    record = await written(log_with(ring), body, topic=topic)
    event = await read(record, ring)
    assert event.body == body and event.meta.cipher is None
    await ring.destroy(SUBJECT, "asked")
    event = await read(record, ring)
    assert event.meta.cipher is not None
    for name in msgspec.structs.asdict(body):
        found, was = getattr(event.body, name), getattr(body, name)
        if name not in CONTENT[kind]:
            assert found == was
        elif isinstance(was, bytes):
            assert found == bytes(len(was))
        else:
            assert found == ERASED or not found


# -- a record ---------------------------------------------------------------------------------------------------------


async def test_no_byte_of_the_content_is_in_the_record(ring: KeyRing) -> None:
    record = await written(log_with(ring), MessageReceived(message_id="0", text=SECRET))
    stored = (record.value or b"") + b"".join(raw or b"" for _, raw in record.headers)
    assert SECRET.encode() not in stored
    assert (await read(record, ring)).body.text == SECRET


async def test_structure_is_read_without_the_key(ring: KeyRing) -> None:
    record = await written(log_with(ring), turn())
    for reader, mark in ((None, LOCKED), (KeyRing(KeyFiles(Path("/nonexistent"))), LOCKED)):
        event = await read(record, reader)
        assert (event.meta.seq, event.meta.epoch, event.meta.subject) == (3, 7, SUBJECT)
        assert event.body == msgspec.structs.replace(turn(), prompt=bytes(12), completion=bytes(8), logprobs=bytes(8))
        failed = await written(log_with(ring), SessionFailed(cause=SECRET, first_offset=1))
        assert (await read(failed, reader)).body.cause == mark


async def test_an_erased_subject_is_read_as_such_by_a_process_that_had_the_key(ring: KeyRing) -> None:
    record = await written(log_with(ring), MessageReceived(message_id="0", text=SECRET))
    assert (await read(record, ring)).body.text == SECRET
    await KeyRing(KeyFiles(ring.store.folder)).destroy(SUBJECT, "asked")  # type: ignore[attr-defined]
    event = await read(record, ring)
    assert (event.body.message_id, event.body.text) == ("0", ERASED) and event.meta.cipher is not None


async def test_an_append_for_an_erased_subject_is_refused_in_one_clear_line(ring: KeyRing) -> None:
    """Guarantee 9: a late writer."""
    log = log_with(ring)
    await written(log, MessageReceived(message_id="0", text="before"))
    await ring.destroy(SUBJECT, "asked")
    with pytest.raises(SubjectErased, match=r"^subject 'ann' was erased: .*written any more$"):
        await written(log, MessageReceived(message_id="1", text=SECRET))
    record = await written(log, SessionFailed(cause="", first_offset=1))
    assert (await read(record, ring)).body.cause == "", "structure may still end what has begun"


async def test_a_subjectless_event_is_written_as_it_was_before_there_were_keys(ring: KeyRing) -> None:
    body = ToolCompleted(call_id="0.0", turn=0, index=0, text=SECRET)
    record = await written(log_with(ring), body, subject="")
    meta = Meta(origin="production", seq=3, epoch=7, correlation="c")
    assert (record.value, record.headers) == encode(Event.of(body, id="e-1", source="test", meta=meta))


@pytest.mark.parametrize("change", ["topic", "key", "ce_id", "ce_type", "subject"])
async def test_encrypted_content_moved_to_another_event_does_not_open(ring: KeyRing, change: str) -> None:
    log = log_with(ring)
    record = await written(log, ToolCompleted(call_id="0.0", turn=0, index=0, text=SECRET))
    headers = dict(record.headers)
    moved = dataclasses.replace(record)
    match change:
        case "topic":
            theirs = FeedbackGiven(session_id=KEY, verdict="accepted", comment=SECRET)
            record = await written(log, theirs, topic="feedback.v1")
            assert (await read(record, ring)).body == theirs
            moved = dataclasses.replace(record, ref=RecordRef("feedback.v1.acme", 0, 5))
        case "key":
            moved = dataclasses.replace(record, key_bytes=b"s-2")
        case "ce_id":
            moved = dataclasses.replace(record, headers=tuple((headers | {"ce_id": b"e-2"}).items()))
        case "ce_type":
            other = await written(log, MessageReceived(message_id="0", text="x"))
            meta, _ = codec.decode(record.value, "tool.completed.v1")
            theirs, body = codec.decode(other.value, "message.received.v1")
            assert meta.cipher is not None and theirs.cipher is not None
            forged = codec.encode(body, msgspec.structs.replace(theirs, cipher=meta.cipher))
            moved = dataclasses.replace(other, value=forged)
        case "subject":
            await ring.obtain("ben")
            meta, body = codec.decode(record.value, "tool.completed.v1")
            forged = codec.encode(msgspec.structs.replace(body, text=""), msgspec.structs.replace(meta, subject="ben"))
            moved = dataclasses.replace(record, value=forged)
            moved.keys = ring
            assert moved.event.body.text == LOCKED, "another key's: no content, and nobody's poison"
            return
    with pytest.raises(DecodeError, match="changed, or belongs to another place"):
        await read(moved, ring)


async def test_a_dead_letter_still_opens_as_the_record_it_was(ring: KeyRing) -> None:
    record = await written(log_with(ring), MessageReceived(message_id="0", text=SECRET))
    letter = DeadLetter(9, "reward", record.ref, record.key_bytes, record.value, record.headers, "handler", "", 1, 0)
    assert SECRET.encode() not in (letter.value or b"")
    assert (await read(letter.record(), ring)).body.text == SECRET


async def test_a_forged_length_is_refused(ring: KeyRing) -> None:
    meta = Meta(subject=SUBJECT, cipher=Cipher(box=b"x", lengths={"completion": 10**15}))
    with pytest.raises(DecodeError, match="claims 1000000000000000 bytes"):
        codec.decode(codec.encode(turn(), meta), "turn.sampled.v1")


# -- large content ----------------------------------------------------------------------------------------------------


async def test_large_content_is_an_object_of_the_subject_and_the_structure_outlives_it(ring: KeyRing) -> None:
    blobs = BlobStore(MemoryStore(), keys=ring)
    body = ToolCompleted(call_id="0.0", turn=0, index=0, text=SECRET * INLINE_LIMIT)
    record = await written(log_with(ring, blobs), body)
    (key,) = await blobs.of_subject(SUBJECT)
    assert key.startswith("blobs/ann/") and len(record.value or b"") < 1000
    assert SECRET.encode() not in await blobs.store.get(key)
    assert (await read(record, ring, blobs)).body == body
    await ring.destroy(SUBJECT, "asked")
    assert (await blobs.remove(SUBJECT)).removed == 1
    event = await read(record, ring, blobs)
    assert (event.body.call_id, event.body.text, event.meta.seq) == ("0.0", ERASED, 3), "not poison: nothing is missing"


async def test_an_object_that_goes_while_it_is_read_because_its_subject_is_erased_is_no_fault(ring: KeyRing) -> None:
    class Erasing(MemoryStore):
        async def get(self, key: str) -> bytes:
            await ring.destroy(SUBJECT, "asked")
            raise BlobMissing("just removed", key=key)

    blobs = BlobStore(Erasing(), keys=ring, cache_bytes=0)
    record = await written(log_with(ring, blobs), MessageReceived(message_id="0", text="x" * 2 * INLINE_LIMIT))
    assert (await read(record, ring, blobs)).body.text == ERASED


async def test_a_missing_object_of_a_subject_that_was_not_erased_is_a_fault(ring: KeyRing) -> None:
    blobs = BlobStore(MemoryStore(), keys=ring, cache_bytes=0)
    record = await written(log_with(ring, blobs), MessageReceived(message_id="0", text="x" * 2 * INLINE_LIMIT))
    await blobs.remove(SUBJECT)
    with pytest.raises(DecodeError, match="claim check"):
        await read(record, ring, blobs)


class Choosy(MemoryStore):
    """Refuses what a store of S3 refuses, as an outage or a wrong configuration would look."""

    async def get(self, key: str) -> bytes:
        if not 0 < len(key) <= LONGEST_KEY or "//" in key or ".." in key:
            raise Terminal(f"{key[:20]}: refused with 400", key=key)
        return await super().get(key)


DEEP = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
AT = "blobs/shared/" + "0" * 64
CLAIMS = {
    "nested deeply": DEEP,
    "no address": msgspec.msgpack.encode(BlobRef(key="", sha256="", size=0)),
    "a long address": msgspec.msgpack.encode(BlobRef(key=f"{'x' * 2000}/{AT}", sha256="0" * 64, size=1)),
    "an address upwards": msgspec.msgpack.encode(BlobRef(key=f"../{AT}", sha256="0" * 64, size=1)),
    "an address with an empty part": msgspec.msgpack.encode(BlobRef(key=f"a//{AT}", sha256="0" * 64, size=1)),
    "another object": msgspec.msgpack.encode(BlobRef(key="checkpoints/demo/3", sha256="0" * 64, size=1)),
    "no such object": msgspec.msgpack.encode(BlobRef(key=AT, sha256="0" * 64, size=1)),
    "of a stranger": msgspec.msgpack.encode(BlobRef(key=AT, sha256="0" * 64, size=1, subject="nobody")),
    "of an erased subject": msgspec.msgpack.encode(BlobRef(key=AT, sha256="0" * 64, size=1, subject="gone")),
}


@pytest.mark.parametrize("header", [CLAIM_HEADER, BOX_HEADER])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
async def test_whatever_a_claim_check_says_it_spoils_its_own_record_only(
    ring: KeyRing, claim: bytes, header: str
) -> None:
    """Any client may write one to an open topic: an error that is none of the record's would stop every reader there,
    for ever."""
    await ring.obtain(SUBJECT)
    await ring.destroy("gone", "asked")
    headers: Headers = ((CLAIM_HEADER, b"1"),) if header == CLAIM_HEADER else ()
    if header == BOX_HEADER:
        headers = ((SUBJECT_HEADER, SUBJECT.encode()), (BOX_HEADER, claim))
    record = Record(RecordRef("tasks.v1", 0, 5), KEY.encode(), claim, headers, 0)
    with pytest.raises(DecodeError, match="claim check"):
        await read(record, ring, BlobStore(Choosy(), keys=ring, cache_bytes=0))


# -- older types ------------------------------------------------------------------------------------------------------


async def test_an_older_type_is_opened_before_it_is_brought_forward(
    ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(body: dict[str, Any]) -> dict[str, Any]:
        return {**{name: value for name, value in body.items() if name != "content"}, "text": body["content"].upper()}

    monkeypatch.setitem(UPCASTERS, ("message.received", 0), step)
    key = await ring.obtain(SUBJECT)
    plain = msgspec.msgpack.encode({"content": "hello"})
    meta = Meta(subject=SUBJECT, cipher=Cipher(box=key.encrypt(plain, b"p"), lengths={"content": 0}))
    value = msgspec.msgpack.encode(
        {"meta": meta, "body": {"type": "message.received.v0", "message_id": "0", "content": ""}}
    )
    found, body = codec.decode(value, "message.received.v0", reveal=lambda m: key.decrypt(m.cipher.box, b"p"))  # type: ignore[union-attr]
    assert (found.cipher, body.text) == (None, "HELLO")
    found, body = codec.decode(value, "message.received.v0")
    assert found.cipher is not None and body.text == ""


# -- objects ----------------------------------------------------------------------------------------------------------


async def test_a_subjects_object_is_addressed_by_its_ciphertext(ring: KeyRing) -> None:
    blobs = BlobStore(MemoryStore(), keys=ring)
    ours, again = await blobs.put(SECRET.encode(), subject="ann"), await blobs.put(SECRET.encode(), subject="ann")
    theirs, nobodys = await blobs.put(SECRET.encode(), subject="ben"), await blobs.put(SECRET.encode())
    assert len({ours.key, again.key, theirs.key, nobodys.key}) == 4, "equal text is not recognisable"
    assert [await blobs.get(ref) for ref in (ours, again, theirs, nobodys)] == [SECRET.encode()] * 4
    await ring.destroy("ann", "asked")
    with pytest.raises(SubjectErased, match="'ann' was erased"):
        await blobs.get(ours)
    assert await blobs.get(theirs) == SECRET.encode()


async def test_the_cache_of_a_blob_store_holds_ciphertext(ring: KeyRing) -> None:
    blobs = BlobStore(MemoryStore(), keys=ring)
    ref = await blobs.put(SECRET.encode(), subject="ann")
    await blobs.get(ref)
    assert blobs._cache and all(SECRET.encode() not in data for data in blobs._cache.values())


async def test_erasing_a_subject_reaches_no_other_whose_name_begins_alike(ring: KeyRing) -> None:
    blobs = BlobStore(MemoryStore(), keys=ring)
    names = ["a", "a/b", "ab", "shared", "..", "."]
    refs = {name: await blobs.put(b"x", subject=name) for name in names}
    nobodys = await blobs.put(b"x")
    assert (await blobs.remove("a")).removed == 1
    for name in names[1:]:
        assert await blobs.get(refs[name]) == b"x"
    assert await blobs.get(nobodys) == b"x"
