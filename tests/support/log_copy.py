"""A log as a file, and a file (or part of one) as a log again: same records, same offsets, on any real broker.

Offsets matter, because events refer to each other by them. Holes in a kept log are transaction markers and aborted
records; they are made again as what they were, since nothing else can take an offset without being read.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.clients import consumer, producer
from odradek.streams.config import KafkaConfig
from odradek.streams.log import EventLog
from odradek.streams.topics import Cleanup
from support.waiting import eventually

FILLER = b"aborted: no committed reader sees this"


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One record as it lies on the broker."""

    topic: str
    """Without the deployment's prefix."""
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    is_end: bool = False
    """No record: the partition ends at this offset (the last record may have a marker behind it)."""


async def copied(event_log: EventLog) -> list[Stored]:
    """Every committed record of every declared topic, by topic, partition and offset, and where each one ends."""
    found = []
    for row in topics.ALL:
        for number, end in sorted((await event_log.stable_ends(row.name)).items()):
            start = await event_log.beginning(row.name, number)
            async for one in event_log.read(row.name, number, start, end):
                found.append(
                    Stored(
                        row.name, number, one.ref.offset, one.timestamp_ms, one.key_bytes, one.value, list(one.headers)
                    )
                )
            if end:
                found.append(Stored(row.name, number, end, 0, None, None, [], is_end=True))
    return found


def save(path: Path, records: Iterable[Stored]) -> None:
    """One msgpack array, compressed."""
    path.write_bytes(lzma.compress(msgspec.msgpack.encode(list(records)), preset=9))


def load(path: Path) -> list[Stored]:
    """The records of a file."""
    return msgspec.msgpack.decode(lzma.decompress(path.read_bytes()), type=list[Stored])


async def write(config: KafkaConfig, records: Iterable[Stored]) -> None:
    """Put the records on a fresh deployment, each at its own offset (compacted topics: in their order)."""
    await ensure_topics(config)
    plain, staged = producer(config), producer(config, transactional_id=config.name("log-copy"))
    reader = consumer(config, committed=False)
    for client in (plain, staged, reader):
        await client.start()
    try:
        ordered = sorted(records, key=_place)
        for (topic, number), part in groupby(ordered, key=lambda one: (one.topic, one.partition)):
            exact = topics.declared(topic).cleanup is not Cleanup.COMPACT
            place = TopicPartition(config.name(topic), number)
            await _Copy(plain, staged, reader, place, exact).write(list(part))
    finally:
        for client in (plain, staged, reader):
            await client.stop()


def _place(one: Stored) -> tuple[str, int, int]:
    return one.topic, one.partition, one.offset


class _Copy:
    """One partition. A hole of one offset follows a transaction (its marker); two more are an aborted record and its
    marker. A commit is answered before its marker is written, so each marker is waited for."""

    def __init__(
        self,
        plain: AIOKafkaProducer,
        staged: AIOKafkaProducer,
        reader: AIOKafkaConsumer,
        place: TopicPartition,
        exact: bool,
    ) -> None:
        self._plain, self._staged, self._reader = plain, staged, reader
        self._place, self._exact = place, exact

    async def write(self, records: list[Stored]) -> None:
        for before, one, hole in _holes(records):
            await self._aborted(before // 2)
            if self._exact and hole % 2:
                await self._staged.begin_transaction()
                at = await self._send(self._staged, one)
                await self._staged.commit_transaction()
                await self._end_is(at.offset + 2)
            else:
                at = await self._send(self._plain, one)
            if self._exact:
                assert at.offset == one.offset, f"{self._place}@{one.offset} was written at {at.offset}"
            await self._aborted(hole // 2)

    async def _send(self, by: AIOKafkaProducer, one: Stored) -> Any:
        topic, number = self._place
        return await by.send_and_wait(
            topic, one.value, one.key, partition=number, timestamp_ms=one.timestamp_ms, headers=one.headers
        )

    async def _aborted(self, times: int) -> None:
        topic, number = self._place
        for _ in range(times if self._exact else 0):
            await self._staged.begin_transaction()
            at = await self._staged.send_and_wait(topic, FILLER, partition=number)
            await self._staged.abort_transaction()
            await self._end_is(at.offset + 2)

    async def _end_is(self, offset: int) -> None:
        async def reached() -> bool:
            return bool((await self._reader.end_offsets([self._place]))[self._place] >= offset)

        await eventually(reached, f"the marker before {self._place}@{offset}")


def _holes(records: list[Stored]) -> Iterator[tuple[int, Stored, int]]:
    """Each record with the offsets missing before the first, and after it up to the next."""
    for index, one in enumerate(records):
        following = records[index + 1].offset if index + 1 < len(records) else one.offset + 1
        if not one.is_end:
            yield (one.offset if index == 0 else 0), one, following - one.offset - 1
