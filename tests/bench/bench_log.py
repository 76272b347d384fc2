"""Append and replay throughput of EventLog against raw aiokafka and confluent-kafka, in one run on one broker.

`python tests/bench/bench_log.py [--bootstrap HOST:PORT] [--records N]`; without an address it starts a broker of its
own. All three write the same 2 KB values, zstd, acks=all, idempotent; ours also encodes them in the measured time.
Reading is timed from the first record on. Quote the ratios: absolute numbers belong to the machine and to what else
ran on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as ConfluentPartition

from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.testing import running, scratch
from odradek.streams import admin, clients
from odradek.streams.codec import f32, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, encode, event_id
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import TurnSampled
from odradek.streams.log import EventLog

TOPIC = "sessions.v1"
"""The values are session turns of about 2 KB."""
SESSIONS = 64
"""Writers at one time: what a host with many sessions looks like to the broker."""
ONE_BY_ONE = 300
"""Appends in the latency run."""


def turn(session: int, number: int) -> Event[TurnSampled]:
    tokens = range(number, number + 230)
    body = TurnSampled(
        turn=number,
        position=number,
        prompt=i32(tokens),
        completion=i32(list(tokens)[:110]),
        logprobs=f32([-0.001 * (one % 997) for one in tokens][:110]),
        spans=[],
        numerics_id="bench",
        finish_reason="stop",
    )
    return Event.of(body, id=event_id(session, number), source="bench", meta=Meta(seq=number))


def made_beforehand(records: int) -> dict[tuple[int, int], tuple[bytes, Any]]:
    """The values and headers that `spread` appends."""
    return {place: encode(turn(*place)) for place in places(records)}


def places(records: int) -> list[tuple[int, int]]:
    """(session, step) of each append."""
    return [(session, step) for step in range(records // SESSIONS) for session in range(SESSIONS)]


async def spread(records: int, append: Callable[[int, int], Awaitable[Any]]) -> float:
    """Records a second when SESSIONS writers each append one after another."""

    async def session(number: int) -> None:
        for step in range(records // SESSIONS):
            await append(number, step)

    began = time.perf_counter()
    await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    return (records // SESSIONS * SESSIONS) / (time.perf_counter() - began)


async def append_ours(config: KafkaConfig, records: int) -> tuple[float, float]:
    async with EventLog(config) as log:
        times = []
        for number in range(ONE_BY_ONE):
            began = time.perf_counter()
            await log.append(TOPIC, "latency", turn(0, number))
            times.append(time.perf_counter() - began)
        events = {place: turn(*place) for place in places(records)}
        rate = await spread(records, lambda session, step: log.append(TOPIC, f"s{session}", events[session, step]))
    return rate, statistics.median(times) * 1000


async def append_aiokafka(config: KafkaConfig, records: int) -> tuple[float, float]:
    """The same client with the same settings, values made beforehand: what our layer costs."""
    made = made_beforehand(records)
    value, headers = made[0, 0]
    producer = AIOKafkaProducer(
        bootstrap_servers=config.bootstrap,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        max_batch_size=clients.BATCH_BYTES,
    )
    await producer.start()
    try:
        name, times = config.name(TOPIC), []
        for _ in range(ONE_BY_ONE):
            began = time.perf_counter()
            await producer.send_and_wait(name, value, key=b"latency", headers=list(headers))
            times.append(time.perf_counter() - began)

        async def append(session: int, step: int) -> None:
            value, headers = made[session, step]
            await producer.send_and_wait(name, value, key=b"s%d" % session, headers=list(headers))

        rate = await spread(records, append)
    finally:
        await producer.stop()
    return rate, statistics.median(times) * 1000


def append_confluent(config: KafkaConfig, records: int) -> float:
    """librdkafka, pipelined: as fast as a client that waits for nothing can be."""
    made = made_beforehand(records)
    producer = Producer(
        {
            "bootstrap.servers": config.bootstrap,
            "enable.idempotence": True,
            "compression.type": "zstd",
            "queue.buffering.max.messages": records + 1,
        }
    )
    began = time.perf_counter()
    for (session, _), (value, headers) in made.items():
        producer.produce(config.name(TOPIC), value, key=b"s%d" % session, headers=list(headers))
        producer.poll(0)
    producer.flush(60)
    return len(made) / (time.perf_counter() - began)


async def replay_ours(config: KafkaConfig) -> tuple[float, float]:
    """Records a second read, and read and decoded."""
    async with EventLog(config) as log:
        ends = await log.stable_ends(TOPIC)
        rates = []
        for decoded in (False, True):
            began, count = time.perf_counter(), 0
            for number in ends:
                async for record in log.read(TOPIC, number, 0):
                    count += 1
                    if decoded:
                        _ = record.event
            rates.append(count / (time.perf_counter() - began))
    return rates[0], rates[1]


async def replay_aiokafka(config: KafkaConfig, ends: dict[int, int]) -> float:
    consumer = AIOKafkaConsumer(bootstrap_servers=config.bootstrap, max_partition_fetch_bytes=clients.FETCH_BYTES)
    await consumer.start()
    try:
        tps = [TopicPartition(config.name(TOPIC), number) for number in ends]
        consumer.assign(tps)
        await consumer.seek_to_beginning(*tps)
        first = await consumer.getmany(timeout_ms=10_000, max_records=1)
        began, count, left = time.perf_counter(), 0, sum(ends.values()) - len(first)
        while count < left:
            count += sum(map(len, (await consumer.getmany(timeout_ms=1000)).values()))
        return count / (time.perf_counter() - began)
    finally:
        await consumer.stop()


def replay_confluent(config: KafkaConfig, ends: dict[int, int]) -> float:
    consumer = Consumer({"bootstrap.servers": config.bootstrap, "group.id": uuid.uuid4().hex})
    consumer.assign([ConfluentPartition(config.name(TOPIC), number, 0) for number in ends])
    first = consumer.consume(1, 10.0)
    began, count, left = time.perf_counter(), 0, sum(ends.values()) - len(first)
    while count < left:
        count += len(consumer.consume(1000, 1.0))
    rate = count / (time.perf_counter() - began)
    consumer.close()
    return rate


async def measure(bootstrap: str, records: int) -> dict[str, Any]:
    def deployment() -> KafkaConfig:
        return KafkaConfig(bootstrap=bootstrap, prefix=f"bench{uuid.uuid4().hex[:8]}")

    configs = [deployment() for _ in range(3)]
    for config in configs:
        await admin.ensure_topics(config)
    ours, raw, native = configs
    our_rate, our_p50 = await append_ours(ours, records)
    raw_rate, raw_p50 = await append_aiokafka(raw, records)
    native_rate = append_confluent(native, records)
    async with EventLog(ours) as log:
        ends = await log.stable_ends(TOPIC)
    read, decoded = await replay_ours(ours)
    raw_read = await replay_aiokafka(ours, ends)
    native_read = replay_confluent(ours, ends)
    return {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "value_bytes": len(encode(turn(1, 1))[0]),
        "append_one_by_one_p50_ms": {"eventlog": our_p50, "aiokafka": raw_p50, "ratio": our_p50 / raw_p50},
        "append_64_sessions_per_s": {
            "eventlog": our_rate,
            "aiokafka": raw_rate,
            "confluent_pipelined": native_rate,
            "ratio_to_aiokafka": our_rate / raw_rate,
            "ratio_to_confluent": our_rate / native_rate,
        },
        "replay_per_s": {
            "eventlog_raw": read,
            "eventlog_decoded": decoded,
            "aiokafka": raw_read,
            "confluent": native_read,
            "ratio_to_aiokafka": read / raw_read,
            "ratio_decoded_to_confluent": decoded / native_read,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--records", type=int, default=20_000)
    options = parser.parse_args()
    if options.bootstrap:
        found = asyncio.run(measure(options.bootstrap, options.records))
    else:
        with scratch() as data, running(data, Kafka(data)) as stack:
            found = asyncio.run(measure(stack.address("kafka"), options.records))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
