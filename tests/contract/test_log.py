"""EventLog against a real broker: durability, order, committed reads, gaps, strange headers, deadlines."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.record.util import calc_crc32c
from confluent_kafka import Producer
from support.waiting import eventually

from odradek.streams import admin, clients
from odradek.streams import log as log_module
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.clients import partition
from odradek.streams.codec import INLINE_LIMIT
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.errors import (
    AppendUncertain,
    BrokerUnreachable,
    DecodeError,
    OffsetGap,
    TopicDrift,
    UnknownTopic,
)
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import SessionResumed
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.polling import Gap, GapPolicy
from odradek.streams.testing import an_event, event_log, fresh_config, kafka_config, key
from odradek.streams.topics import SESSIONS, TASKS

__all__ = ["event_log", "fresh_config", "kafka_config", "key"]
pytestmark = pytest.mark.contract


def note(session: str, number: int) -> SessionResumed:
    return SessionResumed(session_id=session, reason=str(number))


async def append_notes(log: EventLog, session: str, count: int, first: int = 0) -> list[RecordRef]:
    return await log.append_many(
        "sessions.v1",
        [(session, an_event(note(session, number), session, number)) for number in range(first, first + count)],
    )


async def reasons(records: AsyncIterator[Record]) -> list[int]:
    return [int(record.event.body.reason) async for record in records]


class TestAdmin:
    async def test_creating_twice_creates_once(self, kafka_config: KafkaConfig) -> None:
        assert await admin.ensure_topics(kafka_config) == []

    async def test_a_tenant_gets_open_topics_of_its_own(self, fresh_config: KafkaConfig) -> None:
        assert await admin.ensure_topics(fresh_config, ["acme"]) == ["tasks.v1.acme", "feedback.v1.acme"]

    async def test_drift_names_topic_expected_and_found(self, fresh_config: KafkaConfig) -> None:
        client = AIOKafkaAdminClient(bootstrap_servers=fresh_config.bootstrap)
        await client.start()
        await client.delete_topics([fresh_config.name("weights.v1")])

        async def gone() -> bool:
            return fresh_config.name("weights.v1") not in await client.list_topics()

        await eventually(gone, "the topic to be gone")
        wrong = admin.NewTopic(
            fresh_config.name("weights.v1"), 2, 1, topic_configs={"cleanup.policy": "delete", "retention.ms": "60000"}
        )
        await client.create_topics([wrong])
        await client.close()
        with pytest.raises(TopicDrift, match=r"weights\.v1: partitions expected 1, found 2") as caught:
            await admin.ensure_topics(fresh_config)
        assert "weights.v1: retention.ms expected -1, found 60000" in str(caught.value)


class TestAppend:
    async def test_an_acknowledged_event_is_read_back_whole(self, event_log: EventLog, key: str) -> None:
        event = an_event(note(key, 1), key, meta=Meta(origin="eval", seq=4, epoch=2, subject="ann"))
        ref = await event_log.append("sessions.v1", key, event)
        record = await event_log.read_ref(ref)
        assert (record.ref, record.key, record.event) == (ref, key, event)
        assert ref.topic == "sessions.v1"
        assert ref.partition == SESSIONS.partition_of(key)

    async def test_append_many_keeps_the_order_given(self, event_log: EventLog, key: str) -> None:
        refs = await append_notes(event_log, key, 300)
        assert refs == sorted(refs)
        assert await reasons(event_log.read_key("sessions.v1", key)) == list(range(300))

    async def test_many_appends_at_once_are_each_stored_once(self, event_log: EventLog, key: str) -> None:
        await asyncio.gather(
            *(event_log.append("sessions.v1", key, an_event(note(key, number))) for number in range(500))
        )
        assert sorted(await reasons(event_log.read_key("sessions.v1", key))) == list(range(500))

    async def test_the_partition_of_a_key_is_the_one_javas_clients_choose(self, event_log: EventLog, key: str) -> None:
        ref = await event_log.append("sessions.v1", key, an_event(note(key, 0)))
        java_like = Producer({"bootstrap.servers": event_log.config.bootstrap, "partitioner": "murmur2_random"})
        seen: list[int] = []
        java_like.produce(
            event_log.config.name("sessions.v1"), key=key, value=b"x", callback=lambda _, m: seen.append(m.partition())
        )
        java_like.flush(10)
        assert seen == [ref.partition]

    async def test_a_broker_that_does_not_answer_makes_an_append_uncertain(self, event_log: EventLog, key: str) -> None:
        event = an_event(note(key, 0), key)
        with pytest.raises(AppendUncertain, match="append the same event again"):
            await event_log.append("sessions.v1", key, event, deadline_s=0)
        await event_log.append("sessions.v1", key, event)
        ids = [record.event.id async for record in event_log.read_key("sessions.v1", key)]
        assert set(ids) == {event.id}


class TestRead:
    async def test_a_range_holds_exactly_its_offsets(self, event_log: EventLog, key: str) -> None:
        refs = await append_notes(event_log, key, 50)
        number, first = refs[0].partition, refs[10].offset
        found = event_log.read("sessions.v1", number, first, refs[20].offset)
        offsets = [record.ref.offset async for record in found]
        assert offsets == [ref.offset for ref in refs[10:20]]

    async def test_a_session_is_folded_from_its_first_offset(self, event_log: EventLog, key: str) -> None:
        refs = await append_notes(event_log, key, 5)
        await append_notes(event_log, f"{key}-other", 5)
        assert await reasons(event_log.read_key("sessions.v1", key, start=refs[0].offset)) == [0, 1, 2, 3, 4]

    async def test_first_offsets_are_remembered_and_new_keys_still_found(self, event_log: EventLog, key: str) -> None:
        await append_notes(event_log, key, 3)
        assert await reasons(event_log.read_key("sessions.v1", key)) == [0, 1, 2]
        await append_notes(event_log, key, 2, first=3)
        assert await reasons(event_log.read_key("sessions.v1", key)) == [0, 1, 2, 3, 4]
        assert await reasons(event_log.read_key("sessions.v1", f"{key}-unborn")) == []
        await append_notes(event_log, f"{key}-unborn", 1)
        assert await reasons(event_log.read_key("sessions.v1", f"{key}-unborn")) == [0]

    async def test_leaving_a_read_early_frees_its_connection(self, event_log: EventLog, key: str) -> None:
        refs = await append_notes(event_log, key, 20)
        for _ in range(3 * log_module.READERS):
            async with aclosing(event_log.read("sessions.v1", refs[0].partition, refs[0].offset)) as records:
                assert (await anext(records)).ref == refs[0]
        assert await reasons(event_log.read_key("sessions.v1", key, start=refs[0].offset)) == list(range(20))

    async def test_many_readers_at_once_each_see_their_own_range(self, event_log: EventLog, key: str) -> None:
        sessions = [f"{key}-{number}" for number in range(24)]
        starts = {session: (await append_notes(event_log, session, 10))[0].offset for session in sessions}
        found = await asyncio.gather(
            *(reasons(event_log.read_key("sessions.v1", session, start=starts[session])) for session in sessions)
        )
        assert found == [list(range(10))] * 24

    async def test_offsets_for_time(self, event_log: EventLog, key: str) -> None:
        early = await event_log.append("sessions.v1", key, an_event(note(key, 0)))
        await asyncio.sleep(0.05)
        between = datetime.now(UTC)
        await asyncio.sleep(0.05)
        late = await event_log.append("sessions.v1", key, an_event(note(key, 1)))
        found = await event_log.offsets_for_time("sessions.v1", between)
        assert early.offset < found[late.partition] <= late.offset
        future = await event_log.offsets_for_time("sessions.v1", datetime.now(UTC) + timedelta(hours=1))
        assert future == await event_log.stable_ends("sessions.v1")

    async def test_tail_follows_what_is_appended_later(self, event_log: EventLog, key: str) -> None:
        refs = await append_notes(event_log, key, 2)
        tail = event_log.tail("sessions.v1", {refs[0].partition: refs[1].offset})
        assert (await anext(tail)).ref == refs[1]
        (later,) = await append_notes(event_log, key, 1, first=2)
        assert (await anext(tail)).ref == later
        await tail.aclose()

    async def test_a_caller_that_blocks_the_loop_is_not_told_that_the_broker_is_gone(
        self, event_log: EventLog, key: str
    ) -> None:
        refs = await append_notes(event_log, key, 1)
        tail = event_log.tail("sessions.v1", {refs[0].partition: refs[0].offset}, stall_s=0.5)
        assert (await anext(tail)).ref == refs[0]
        await asyncio.sleep(0.5)
        time.sleep(2)  # noqa: ASYNC251 what a training step does
        waiting = asyncio.ensure_future(anext(tail))
        await asyncio.sleep(1)
        (later,) = await append_notes(event_log, key, 1, first=1)
        assert (await waiting).ref == later
        await tail.aclose()


async def delete_before(config: KafkaConfig, topic: str, number: int, offset: int) -> None:
    client = AIOKafkaAdminClient(bootstrap_servers=config.bootstrap)
    await client.start()
    await client.delete_records({partition(config, topic, number): RecordsToDelete(before_offset=offset)})
    await client.close()


class TestGaps:
    """aio-libs/aiokafka #718, #261: position 3, records below 20 deleted."""

    async def prepared(self, log: EventLog, key: str) -> int:
        refs = await append_notes(log, key, 25)
        await delete_before(log.config, "sessions.v1", refs[0].partition, 20)
        return refs[0].partition

    async def test_case_aiokafka_718_a_gap_is_a_typed_error_with_coordinates(
        self, fresh_config: KafkaConfig, key: str
    ) -> None:
        async with EventLog(fresh_config) as log:
            number = await self.prepared(log, key)
            with pytest.raises(OffsetGap, match=rf"sessions\.v1/{number}: offsets 3\.\.19 are gone") as caught:
                await reasons(log.read("sessions.v1", number, 3))
            assert (caught.value.coordinates["expected"], caught.value.coordinates["found"]) == (3, 20)
            with pytest.raises(OffsetGap):
                async with aclosing(log.tail("sessions.v1", {number: 3})) as tail:
                    await anext(tail)

    async def test_case_aiokafka_718_on_request_the_reader_goes_on_and_records_the_gap(
        self, fresh_config: KafkaConfig, key: str
    ) -> None:
        async with EventLog(fresh_config) as log:
            number = await self.prepared(log, key)
            found = await reasons(log.read("sessions.v1", number, 3, gap=GapPolicy.RECORD))
            assert found == [20, 21, 22, 23, 24]
            assert log.gaps == [Gap("sessions.v1", number, 3, 20)]
            tail = log.tail("sessions.v1", {number: 3}, gap=GapPolicy.RECORD)
            assert (await anext(tail)).ref.offset == 20
            await tail.aclose()

    async def test_a_position_past_the_end_is_a_gap_too(self, event_log: EventLog, key: str) -> None:
        ref = await event_log.append("sessions.v1", key, an_event(note(key, 0)))
        end = await event_log.stable_end("sessions.v1", ref.partition)
        with pytest.raises(OffsetGap, match="restored to an older state"):
            await reasons(event_log.read("sessions.v1", ref.partition, end + 100))


class TestForeignRecords:
    """ag2ai/faststream #2458, dpkp/kafka-python PR 2004: header bytes that are not text, null header values."""

    async def published(self, log: EventLog, headers: list[tuple[str, bytes | None]], key: str) -> RecordRef:
        body = b'{"body": {"task_id": "t", "instruction": "do"}}'
        return await log.append_raw("tasks.v1", key.encode(), body, [("ce_type", b"task.published.v1"), *headers])

    async def test_case_faststream_2458_header_bytes_are_kept_raw(self, event_log: EventLog, key: str) -> None:
        odd = await self.published(event_log, [("x-odd", b"\xfe\x41\x80"), ("traceparent", b"\xfe\x41\x80")], key)
        null = await self.published(event_log, [("x-null", None), ("ce_id", None)], key)
        good = await self.published(event_log, [], key)
        assert (await event_log.read_ref(odd)).event.extra == (("x-odd", b"\xfe\x41\x80"),)
        assert (await event_log.read_ref(null)).event.extra == (("x-null", None),)
        assert (await event_log.read_ref(good)).event.body == TaskPublished(task_id="t", instruction="do")

    async def test_header_names_that_are_not_text_do_not_stop_the_reader(self, event_log: EventLog, key: str) -> None:
        refs = await _hostile_batch(event_log.config, key)
        number = refs[0].partition
        found = [record async for record in event_log.read("tasks.v1", number, refs[0].offset, refs[-1].offset + 1)]
        assert [record.ref for record in found] == refs
        assert found[1].headers[0] == ("\\xfe\\x41\\x80".replace("\\x41", "A"), b"x")
        with pytest.raises(DecodeError):
            _ = found[1].event
        assert found[2].event.body.task_id == "t2"
        tail = event_log.tail("tasks.v1", {number: refs[0].offset})
        assert [(await anext(tail)).ref for _ in refs] == refs
        await tail.aclose()


async def _hostile_batch(config: KafkaConfig, key: str) -> list[RecordRef]:
    """Good, bad, good in one record batch; the bad one has a header name of bytes fe 41 80, patched into the batch."""

    def value(number: int) -> bytes:
        return b'{"body": {"task_id": "t%d", "instruction": "do"}}' % number

    good = [("ce_type", b"task.published.v1")]
    producer = AIOKafkaProducer(bootstrap_servers=config.bootstrap)
    await producer.start()
    batch = producer.create_batch()
    for number, headers in ((0, good), (1, [("zqz", b"x")]), (2, good)):
        batch.append(key=key.encode(), value=value(number), timestamp=None, headers=headers)
    batch.close()
    builder = batch._builder

    class Patched:
        """The built batch with the bad name put in and its checksum made right again."""

        def build(self) -> bytearray:
            data = bytearray(builder.build())
            at = data.index(b"zqz")
            data[at : at + 3] = b"\xfe\x41\x80"
            crc_at = struct.calcsize(">qiib")
            struct.pack_into(">I", data, crc_at, calc_crc32c(bytes(data[crc_at + 4 :])))
            return data

        def __getattr__(self, name: str) -> object:
            return getattr(builder, name)

    batch._builder = Patched()
    done = await (await producer.send_batch(batch, config.name("tasks.v1"), partition=0))
    await producer.stop()
    return [RecordRef(topic="tasks.v1", partition=0, offset=done.offset + number) for number in range(3)]


class TestClaimChecks:
    """Above 256 KiB: an object put before the event, verified on read."""

    async def test_a_large_event_is_an_object_and_a_small_record(self, kafka_config: KafkaConfig, key: str) -> None:
        store = MemoryStore()
        large = an_event(SessionResumed(session_id=key, reason="x" * INLINE_LIMIT), meta=Meta(subject="ann"))
        small = an_event(note(key, 1))
        async with EventLog(kafka_config, BlobStore(store)) as log:
            await log.append_many("sessions.v1", [(key, large), (key, small)])
        async with EventLog(kafka_config, BlobStore(store)) as log:
            found = [record async for record in log.read_key("sessions.v1", key)]
        assert [record.event for record in found] == [large, small]
        assert len(found[0].value or b"") < 500
        (name,) = await store.list("")
        assert name.startswith("blobs/ann/")

    async def test_a_damaged_object_spoils_its_own_record_only(self, kafka_config: KafkaConfig, key: str) -> None:
        store = MemoryStore()
        async with EventLog(kafka_config, BlobStore(store)) as log:
            for number in range(3):
                reason = f"{number}" * INLINE_LIMIT if number < 2 else "2"
                await log.append("sessions.v1", key, an_event(SessionResumed(session_id=key, reason=reason)))
        damaged, lost = await store.list("")
        await store.put(damaged, b"something else")
        del store._objects[lost]
        async with EventLog(kafka_config, BlobStore(store)) as log:
            found = [record async for record in log.read_key("sessions.v1", key)]
        for record in found[:2]:
            with pytest.raises(DecodeError, match=rf"claim check.*{record.ref}"):
                _ = record.event
        assert found[2].event.body.reason == "2"

    async def test_a_reader_without_a_store_says_so(self, kafka_config: KafkaConfig, key: str) -> None:
        large = an_event(SessionResumed(session_id=key, reason="x" * INLINE_LIMIT))
        async with EventLog(kafka_config, BlobStore(MemoryStore())) as log:
            ref = await log.append("sessions.v1", key, large)
        async with EventLog(kafka_config) as log:
            record = await log.read_ref(ref)
        with pytest.raises(DecodeError, match="no blob store"):
            _ = record.event


class TestFaults:
    async def test_an_unreachable_broker_is_one_clear_line(self) -> None:
        log = EventLog(KafkaConfig(bootstrap="127.0.0.1:9", connect_timeout_s=3, sasl_password="hush"))
        with pytest.raises(BrokerUnreachable, match=r"no Kafka broker answers at 127\.0\.0\.1:9 within 3 s") as caught:
            await log.start()
        assert "\n" not in str(caught.value)
        assert "hush" not in f"{caught.value} {log.config}"

    async def test_a_topic_that_is_not_there_is_named(self, kafka_bootstrap: str, key: str) -> None:
        config = KafkaConfig(bootstrap=kafka_bootstrap, prefix="nothing-here", request_timeout_s=2)
        async with EventLog(config) as log:
            with pytest.raises((UnknownTopic, AppendUncertain), match="sessions"):
                await log.append("sessions.v1", key, an_event(note(key, 0)))

    async def test_an_undeclared_topic_is_refused(self, event_log: EventLog, key: str) -> None:
        with pytest.raises(UnknownTopic, match="declared"):
            await event_log.append("made-up.v1", key, an_event(note(key, 0)))


async def test_five_lines_of_a_plain_client_publish_a_task(event_log: EventLog, key: str) -> None:
    producer = Producer({"bootstrap.servers": event_log.config.bootstrap})
    task = json.dumps({"body": {"task_id": key, "instruction": "fix it", "attempts": 2}})
    producer.produce(event_log.config.name("tasks.v1"), value=task, headers={"ce_type": "task.published.v1"})
    producer.flush(10)
    found = []
    for number in range(TASKS.partitions):
        async for record in event_log.read("tasks.v1", number, 0):
            if record.value == task.encode():
                found.append(record.event.body)
    assert found == [TaskPublished(task_id=key, instruction="fix it", attempts=2)]


async def test_a_topic_that_a_client_has_not_met_costs_no_pause(
    kafka_config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted actor looks at ten topics at once; the client library's pause after an error is long enough here
    that one of them would be an error."""
    plain = clients.consumer
    monkeypatch.setattr(clients, "consumer", lambda config, **more: plain(config, retry_backoff_ms=3_600_000, **more))
    async with EventLog(msgspec.structs.replace(kafka_config, request_timeout_s=10.0)) as log:
        for topic in (SESSIONS.name, TASKS.name):
            ends = await log.stable_ends(topic)
            assert await log.offsets_for_time(topic, datetime.now(UTC) + timedelta(days=1)) == ends
            assert [record.ref.offset async for record in log.read(topic, 0, ends[0])] == []
        ref = (await append_notes(log, "met", 1))[0]
        assert (await log.read_ref(ref)).ref == ref
