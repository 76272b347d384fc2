"""One poll of assigned partitions, and the two surprises a partition can hold: a gap, and unreadable header names.

Shared by range reads, tails and group consumers, so that each of them goes on, or stops with coordinates, alike.
"""

import logging
from enum import StrEnum
from typing import Any

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka

from odradek.streams import clients
from odradek.streams.blobs import BlobStore
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record, box_of, claim_of, subject_of
from odradek.streams.errors import BlobCorrupt, BlobMissing, DecodeError, OffsetGap, SubjectErased
from odradek.streams.events.meta import BlobRef, RecordRef
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.rawrecords import read_raw

logger = logging.getLogger(__name__)

POLL_MS = 200
"""Milliseconds one poll waits for records. Only how soon a stop is noticed depends on it."""


class GapPolicy(StrEnum):
    """What a reader does when offsets it wants are gone."""

    ERROR = "error"
    """Raise `OffsetGap`: the default, right for anything that folds or trains."""
    RECORD = "record"
    """Go on at the first offset that exists; the gap is logged and kept in `Poller.gaps`."""


class Gap(msgspec.Struct, frozen=True):
    """Offsets [expected, found) of a partition that a reader wanted and the broker no longer has."""

    topic: str
    partition: int
    expected: int
    found: int


def gap_error(topic: str, partition: int, expected: int, found: int) -> OffsetGap:
    """The typed error of a gap, with what to do about it."""
    if found > expected:
        what = f"offsets {expected}..{found - 1} are gone (retention or deletion); the first readable is {found}"
    else:
        what = f"offset {expected} is past the log's end, {found}: has the broker been restored to an older state?"
    return OffsetGap(
        f"{topic}/{partition}: {what}. Restore the log, or read with GapPolicy.RECORD to go on without them",
        topic=topic,
        partition=partition,
        expected=expected,
        found=found,
    )


class Poller:
    """Polls consumers of one configuration and remembers the gaps it went over."""

    def __init__(self, config: KafkaConfig, blobs: BlobStore | None = None, keys: KeyRing | None = None) -> None:
        self._config = config
        self._blobs = blobs
        self._keys = keys
        self.gaps: list[Gap] = []

    async def poll(
        self,
        consumer: AIOKafkaConsumer,
        tps: list[TopicPartition],
        gap: GapPolicy,
        *,
        limit: int | None = None,
    ) -> list[Record]:
        """Records that are there within POLL_MS, in order within each partition."""
        try:
            found = await consumer.getmany(*tps, timeout_ms=POLL_MS, max_records=limit)
        except kafka.OffsetOutOfRangeError:
            for tp in tps:
                await self._over_gap(consumer, tp, gap)
            return []
        except kafka.NoOffsetForPartitionError:
            return []  # partitions were just given to this member; it is about to set their positions
        except kafka.CorruptRecordException:
            return await self._raw(consumer, tps)
        except (kafka.KafkaError, OSError) as error:
            raise clients.translated(self._config, error, "reading", self._bare(tps)) from error
        except Exception:  # header names that are no text, or whatever else a damaged batch brings about in the library
            return await self._raw(consumer, tps)
        return await self.redeemed(
            [
                record_of(topic, one)
                for tp, batch in found.items()
                for topic in (self._config.bare(tp.topic),)
                for one in batch
            ]
        )

    async def redeemed(self, records: list[Record]) -> list[Record]:
        """Marks what is of a foreign type (`KafkaConfig.foreign_types`). Fetches what claim checks stand for, and the
        keys of encrypted content. A missing or damaged object spoils its own record only, and what is gone because its
        subject was erased spoils none; a store that does not answer is `StoreUnreachable`: the records come again."""
        if self._config.foreign_types:
            for record in records:
                mark_foreign(self._config, record)
        if self._blobs is None and self._keys is None:
            return records
        for record in records:
            try:
                if self._keys is not None and (subject := subject_of(record)) is not None:
                    await self._unlock(record, self._keys, subject)
                elif self._blobs is not None and (ref := claim_of(record)) is not None:
                    record.content = await self._claimed(self._blobs, ref)
            except (BlobMissing, BlobCorrupt, DecodeError, SubjectErased) as error:
                at = record.ref
                record.fault = DecodeError.at(f"claim check: {error}", at.topic, at.partition, at.offset)
        return records

    async def _claimed(self, blobs: BlobStore, ref: BlobRef) -> bytes:
        """A claim for a subject without a key here opens for nobody: it must not stop who follows an open topic."""
        if ref.subject and (self._keys is None or await self._keys.find(ref.subject) is None):
            raise DecodeError(f"object {ref.key}: no key of subject {ref.subject!r} here", subject=ref.subject)
        return await blobs.get(ref)

    async def _unlock(self, record: Record, keys: KeyRing, subject: str) -> None:
        """Has the subject's key at hand when the event is decoded."""
        record.keys = keys
        if await keys.find(subject) is None or self._blobs is None or (ref := box_of(record)) is None:
            return
        try:
            record.box = await self._blobs.get_encrypted(ref)
        except BlobMissing:
            if not keys.erased(subject):
                raise

    def _bare(self, tps: list[TopicPartition]) -> str:
        return self._config.bare(tps[0].topic) if tps else ""

    async def _over_gap(self, consumer: AIOKafkaConsumer, tp: TopicPartition, gap: GapPolicy) -> None:
        """The library does not say which partition is out of range: look at each."""
        position = await consumer.position(tp)
        first = (await consumer.beginning_offsets([tp]))[tp]
        end = (await consumer.end_offsets([tp]))[tp]
        if first <= position <= end:
            return
        topic = self._config.bare(tp.topic)
        if gap is GapPolicy.ERROR or position > end:
            raise gap_error(topic, tp.partition, position, first if position < first else end) from None
        logger.warning("%s/%d: offsets %d..%d are gone, going on", topic, tp.partition, position, first - 1)
        self.gaps.append(Gap(topic, tp.partition, position, first))
        consumer.seek(tp, first)

    async def _raw(self, consumer: AIOKafkaConsumer, tps: list[TopicPartition]) -> list[Record]:
        """One batch of each partition by the tolerant parser; where there is none to read, nothing."""
        records: list[Record] = []
        for tp in tps:
            position = await consumer.position(tp)
            if position >= (await consumer.end_offsets([tp]))[tp]:
                continue
            raw, following = await read_raw(consumer, tp, position)
            consumer.seek(tp, following)
            found = [record_of(self._config.bare(tp.topic), one) for one in raw]
            records += await self.redeemed(found)
        return records


def mark_foreign(config: KafkaConfig, record: Record) -> None:
    """What the deployment declares to be no event of its own is poison, and no reason to stand still."""
    raw = next((raw for name, raw in record.headers if name.lower() == "ce_type"), None)
    if raw is not None and (kind := raw.decode("utf-8", "replace")) in config.foreign_types:
        at, what = record.ref, f"event type {kind!r} is declared foreign (kafka.foreign_types)"
        record.fault = DecodeError.at(what, at.topic, at.partition, at.offset)


def record_of(topic: str, stored: Any) -> Record:
    """The client library's record as ours, under the topic's bare name."""
    return Record(
        ref=RecordRef(topic=topic, partition=stored.partition, offset=stored.offset),
        key_bytes=stored.key,
        value=stored.value,
        headers=stored.headers,
        timestamp_ms=stored.timestamp,
        raw_names=getattr(stored, "raw_names", None),
    )
