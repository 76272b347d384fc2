"""Kafka's records as they are stored, by a client that knows nothing of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from odradek.streams import clients, topics
from odradek.streams.config import KafkaConfig


async def stored_records(config: KafkaConfig) -> AsyncIterator[tuple[str, bytes]]:
    """(coordinates, key, value and headers as one) of every record of every topic of the deployment, changelogs and
    aborted transactions included."""
    admin = AIOKafkaAdminClient(**config.client_options())
    await admin.start()
    names = [name for name in await admin.list_topics() if name.startswith(config.name(""))]
    counts = {one["topic"]: len(one["partitions"]) for one in await admin.describe_topics(names)}
    await admin.close()
    assert {config.name(topic.name) for topic in topics.ALL} <= set(names)
    reader = clients.consumer(config, committed=False)
    await clients.start(config, reader)
    try:
        for name in names:
            places = [TopicPartition(name, number) for number in range(counts[name])]
            reader.assign(places)
            await reader.seek_to_beginning(*places)
            ends = await reader.end_offsets(places)
            while any([await reader.position(place) < ends[place] for place in places]):
                for place, batch in (await reader.getmany(*places, timeout_ms=200)).items():
                    for one in batch:
                        parts = [one.key or b"", one.value or b"", *(raw or b"" for _, raw in one.headers)]
                        yield f"{name}/{place.partition}@{one.offset}", b"\x00".join(parts)
    finally:
        await clients.stop(reader)
