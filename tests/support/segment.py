"""Kafka's stored segments, taken apart and put together again as somebody with access to the disk could do it.

Record batches of format v2 (magic 2), with checksums made right afterwards so that broker and clients take them.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.util import calc_crc32c, decode_varint, encode_varint

CRC_AT = 17
COVERED_AT = 21
"""First byte that the checksum covers: attributes. Before it: base offset, length, leader epoch, magic, checksum."""
COUNT_AT = 57
RECORDS_AT = 61
CODEC_BITS = 0x07
CONTROL_BIT = 0x20


@dataclass(frozen=True)
class StoredRecord:
    """One record as bytes: what its offset and time are relative to stays with its place."""

    attributes: int
    time_delta: int
    offset_delta: int
    content: bytes
    """Key, value and headers, as stored."""

    def encoded(self) -> bytes:
        head = bytearray([self.attributes])
        for number in (self.time_delta, self.offset_delta):
            encode_varint(number, head.append)
        body = bytes(head) + self.content
        length = bytearray()
        encode_varint(len(body), length.append)
        return bytes(length) + body


@dataclass(frozen=True)
class StoredBatch:
    """One record batch as bytes."""

    data: bytes

    @property
    def base(self) -> int:
        return int(struct.unpack_from(">q", self.data)[0])

    @property
    def control(self) -> bool:
        return bool(self.data[COVERED_AT + 1] & CONTROL_BIT)

    def records(self) -> list[StoredRecord]:
        """Its records, uncompressed."""
        batch: Any = _DefaultRecordBatchPy(bytearray(self.data))
        batch._maybe_uncompress()
        buffer, cursor, found = bytes(batch._buffer), batch._pos, []
        for _ in range(batch._num_records):
            length, start = decode_varint(buffer, cursor)
            cursor = start + length
            time_delta, at = decode_varint(buffer, start + 1)
            offset_delta, at = decode_varint(buffer, at)
            found.append(StoredRecord(buffer[start], time_delta, offset_delta, buffer[at:cursor]))
        return found

    def holding(self, records: list[StoredRecord]) -> StoredBatch:
        """The batch with other records, uncompressed."""
        data = bytearray(self.data[:RECORDS_AT]) + b"".join(record.encoded() for record in records)
        data[COVERED_AT + 1] &= ~CODEC_BITS & 0xFF
        struct.pack_into(">i", data, COUNT_AT, len(records))
        struct.pack_into(">i", data, 8, len(data) - 12)
        return StoredBatch(bytes(data)).sealed()

    def sealed(self) -> StoredBatch:
        """With a right checksum."""
        data = bytearray(self.data)
        struct.pack_into(">I", data, CRC_AT, calc_crc32c(bytes(data[COVERED_AT:])))
        return StoredBatch(bytes(data))

    def flipped(self, at: int, bits: int) -> StoredBatch:
        """With some bits of one byte changed, checksum left as it was."""
        return StoredBatch(self.data[:at] + bytes([self.data[at] ^ bits]) + self.data[at + 1 :])


def batches(data: bytes) -> list[StoredBatch]:
    """A segment's batches in order."""
    found, at = [], 0
    while at < len(data):
        end = at + 12 + int(struct.unpack_from(">i", data, at + 8)[0])
        found.append(StoredBatch(data[at:end]))
        at = end
    return found


def segment(folder: Path) -> Path:
    """The only segment of a partition's folder."""
    (path,) = folder.glob("*.log")
    return path


def store(path: Path, changed: list[StoredBatch]) -> None:
    """Puts other batches into a segment of a stopped broker; indices are made again when it starts."""
    path.write_bytes(b"".join(batch.data for batch in changed))
    for suffix in (".index", ".timeindex"):
        path.with_suffix(suffix).unlink(missing_ok=True)


# -- what can be done to a segment -------------------------------------------------------------------------------------

Mutation = Callable[[random.Random, list[StoredBatch]], list[StoredBatch]]


def _chosen(chance: random.Random, stored: list[StoredBatch], least: int = 1) -> int:
    """A batch with that many records, none of markers."""
    fit = [n for n, batch in enumerate(stored) if not batch.control and len(batch.records()) >= least]
    return chance.choice(fit)


def flip_stored_byte(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """Any byte that the checksum covers, as it lies there: header fields and compressed bytes included."""
    n = _chosen(chance, stored)
    at = chance.randrange(COVERED_AT, len(stored[n].data))
    return [*stored[:n], stored[n].flipped(at, chance.randrange(1, 256)).sealed(), *stored[n + 1 :]]


def flip_content_byte(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """A byte of key, value or headers of one record."""
    n = _chosen(chance, stored)
    records = stored[n].records()
    r = chance.randrange(len(records))
    content = bytearray(records[r].content)
    content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
    was = records[r]
    records[r] = StoredRecord(was.attributes, was.time_delta, was.offset_delta, bytes(content))
    return [*stored[:n], stored[n].holding(records), *stored[n + 1 :]]


def flip_without_checksum(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """What a bad disk does."""
    n = _chosen(chance, stored)
    at = chance.randrange(COVERED_AT, len(stored[n].data))
    return [*stored[:n], stored[n].flipped(at, chance.randrange(1, 256)), *stored[n + 1 :]]


def drop_record(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    n = _chosen(chance, stored)
    records = stored[n].records()
    if len(records) == 1:
        return [*stored[:n], *stored[n + 1 :]]
    records.pop(chance.randrange(len(records)))
    return [*stored[:n], stored[n].holding(records), *stored[n + 1 :]]


def swap_records(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """Two records of the partition change places: each takes the other's offset and time."""
    taken = {n: batch.records() for n, batch in enumerate(stored) if not batch.control}
    places = [(n, r) for n, records in taken.items() for r in range(len(records))]
    (n, r), (m, q) = chance.sample(places, 2)
    one, other = taken[n][r], taken[m][q]
    taken[n][r] = StoredRecord(one.attributes, one.time_delta, one.offset_delta, other.content)
    taken[m][q] = StoredRecord(other.attributes, other.time_delta, other.offset_delta, one.content)
    return [batch.holding(taken[k]) if k in (n, m) else batch for k, batch in enumerate(stored)]


def reorder_batches(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """Two adjacent batches lie in the other order on disk."""
    n = chance.randrange(len(stored) - 1)
    return [*stored[:n], stored[n + 1], stored[n], *stored[n + 2 :]]


def truncate(chance: random.Random, stored: list[StoredBatch]) -> list[StoredBatch]:
    """The segment ends earlier: at a batch, or within one."""
    n = _chosen(chance, stored)
    records = stored[n].records()
    kept = chance.randrange(len(records))
    if not kept:
        return stored[:n]
    last = records[kept - 1].offset_delta
    shorter = bytearray(stored[n].holding(records[:kept]).data)
    struct.pack_into(">i", shorter, 23, last)
    return [*stored[:n], StoredBatch(bytes(shorter)).sealed()]


MUTATIONS: tuple[Mutation, ...] = (
    flip_stored_byte,
    flip_content_byte,
    flip_without_checksum,
    drop_record,
    swap_records,
    reorder_batches,
    truncate,
)
