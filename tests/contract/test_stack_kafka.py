"""The embedded broker, against real clients: settings that the log relies on."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from odradek.infra.errors import Unreachable
from odradek.infra.stack.kafka import MAX_MESSAGE_BYTES, Kafka, check_kafka

pytestmark = pytest.mark.contract


async def _create(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(topic, 1, 1)])
    finally:
        await admin.close()


async def test_topics_are_never_created_by_accident(kafka_bootstrap: str, topic_prefix: str) -> None:
    """A typo in a topic name must be an error, not a new topic nobody reads."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, request_timeout_ms=3000)
    await producer.start()
    try:
        with pytest.raises(KafkaError):
            await asyncio.wait_for(producer.send_and_wait(f"{topic_prefix}typo", b"x"), 30)
    finally:
        await producer.stop()


async def test_ten_megabyte_records_pass(kafka_bootstrap: str, topic_prefix: str) -> None:
    """`message.max.bytes` leaves room for the largest inlined event."""
    topic = f"{topic_prefix}big"
    await _create(kafka_bootstrap, topic)
    value = bytes(MAX_MESSAGE_BYTES - 1024)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, max_request_size=MAX_MESSAGE_BYTES)
    async with producer:
        sent = await producer.send_and_wait(topic, value)
    assert sent.offset == 0


async def test_transactions_work_on_one_node(kafka_bootstrap: str, topic_prefix: str) -> None:
    """An aborted transaction is invisible to a committed reader, a committed one is seen."""
    topic = f"{topic_prefix}tx"
    await _create(kafka_bootstrap, topic)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id=f"{topic_prefix}id")
    async with producer:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted")
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_and_wait(topic, b"committed")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=kafka_bootstrap, isolation_level="read_committed", enable_auto_commit=False
    )
    async with consumer:
        consumer.assign([TopicPartition(topic, 0)])
        await consumer.seek_to_beginning()
        record = await asyncio.wait_for(consumer.getone(), 30)
    assert record.value == b"committed"
    assert record.offset > 0  # the aborted record really was on the broker


def test_a_cluster_id_that_begins_with_a_dash_is_formatted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One random id in 64 does; the tool takes it for an option unless it is told."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=b"\xf8" + bytes(15)))
    kafka = Kafka(tmp_path)
    kafka.prepare({"broker": 1, "controller": 2}, lambda *_: None)
    assert "cluster.id=-AAA" in (tmp_path / "kafka" / "logs" / "meta.properties").read_text()


def test_the_log_lies_in_the_data_folder_whatever_its_name_and_the_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java's properties are Latin-1 and `log.dirs` a list: the log of `d, é` lay in two folders beside it."""
    monkeypatch.setenv("LC_ALL", "POSIX")
    data = tmp_path / "d, é 日本"
    Kafka(data).prepare({"broker": 1, "controller": 2}, lambda *_: None)
    assert (data / "kafka" / "logs" / "meta.properties").exists()
    assert list(tmp_path.iterdir()) == [data]


def test_an_unreachable_broker_is_one_line_within_its_deadline() -> None:
    """Nothing listens on the discard port; the check must say so and end."""
    with pytest.raises(Unreachable, match=r"^kafka: no metadata from 127\.0\.0\.1:9 within 2 s") as caught:
        check_kafka("127.0.0.1:9", 2.0)
    assert "\n" not in str(caught.value)
