"""Reads the record batch that aiokafka can't: one with a header name that is not UTF-8.

Any client may put such a name on an open topic; aiokafka then fails on every fetch of that batch, for ever, and with it
on all good records behind. Here the batch is fetched once more and parsed with such names decoded by
"backslashreplace": the bad record arrives like any other (whoever needs its headers dead-letters it) and the good ones
are handled. A batch that is really damaged is a `DecodeError` with its coordinates.
"""

import struct
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.util import decode_varint_py as decode_varint  # the fast one reads on beyond the buffer's end

from odradek.streams.errors import DecodeError, Retryable

READ_COMMITTED = 1
FETCH_BYTES = 16 * 1024 * 1024
"""Bytes asked for: one whole batch with the largest record has to fit."""
WAIT_MS = 1000
"""Milliseconds the broker may wait; the batch is already there."""
LOG_OVERHEAD = struct.calcsize(">qi")


class RawRecord(NamedTuple):
    """The fields of aiokafka's ConsumerRecord that this room uses."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    raw_names: tuple[bytes, ...]
    """Header names as they are stored."""


async def read_raw(consumer: AIOKafkaConsumer, tp: TopicPartition, position: int) -> tuple[list[RawRecord], int]:
    """The records from `position` to the end of the batch that holds it, and the offset that follows the batch."""
    client = consumer._client
    leader = client.cluster.leader_for_partition(tp)
    request = FetchRequest(
        WAIT_MS, 1, FETCH_BYTES, READ_COMMITTED, [(tp.topic, [(tp.partition, position, FETCH_BYTES)])]
    )
    response = await client.send(leader, request)
    (_, partitions) = response.topics[0]
    (_, error_code, _, *rest) = partitions[0]
    if error_code:
        raise Retryable(f"fetching {tp.topic}/{tp.partition}@{position} again: {kafka.for_code(error_code).__name__}")
    aborted = rest[2] if response.API_VERSION >= 11 else rest[-2]
    return parse(bytes(rest[-1] or b""), tp, position, list(aborted or ()))


def parse(
    data: bytes, tp: TopicPartition, position: int, aborted: list[tuple[int, int]]
) -> tuple[list[RawRecord], int]:
    """The batch holding `position`. A batch of an aborted transaction or of markers has nothing to show; `aborted` are
    the transactions (producer, first offset) that end, aborted, at `position` or later."""
    start = 0
    while start + LOG_OVERHEAD <= len(data):
        (length,) = struct.unpack_from(">i", data, start + 8)
        end = start + LOG_OVERHEAD + length
        if end > len(data):
            break
        batch = _DefaultRecordBatchPy(bytearray(data[start:end]))
        if batch.next_offset > position:
            try:
                return _records(batch, tp, position, aborted), batch.next_offset
            except DecodeError:
                raise
            except Exception as error:  # lengths that lead nowhere, compressed bytes that are none
                what = f"record batch can't be read ({type(error).__name__})"
                raise DecodeError.at(what, tp.topic, tp.partition, batch.base_offset) from error
        start = end
    raise DecodeError.at("no whole record batch", tp.topic, tp.partition, position)


def _records(batch: Any, tp: TopicPartition, position: int, aborted: list[tuple[int, int]]) -> list[RawRecord]:
    if not batch.validate_crc():
        raise DecodeError.at("record batch fails its checksum", tp.topic, tp.partition, batch.base_offset)
    undone = any(batch.producer_id == producer and first <= batch.base_offset for producer, first in aborted)
    if batch.is_control_batch or (batch.is_transactional and undone):
        return []
    batch._maybe_uncompress()
    buffer, cursor, found = bytes(batch._buffer), batch._pos, []
    for _ in range(batch._num_records):
        record, cursor = _record(buffer, cursor, batch, tp)
        if record.offset >= position:
            found.append(record)
    if cursor != len(buffer):
        raise ValueError(f"{len(buffer) - cursor} bytes behind the last record")
    return found


def _record(buffer: bytes, cursor: int, batch: Any, tp: TopicPartition) -> tuple[RawRecord, int]:
    """One record of format v2: varint length, attributes, time and offset deltas, key, value, headers."""
    length, start = decode_varint(buffer, cursor)
    time_delta, cursor = decode_varint(buffer, start + 1)
    offset_delta, cursor = decode_varint(buffer, cursor)
    key, cursor = _chunk(buffer, cursor)
    value, cursor = _chunk(buffer, cursor)
    count, cursor = decode_varint(buffer, cursor)
    headers: list[tuple[bytes, bytes | None]] = []
    for _ in range(count):
        name, cursor = _chunk(buffer, cursor)
        content, cursor = _chunk(buffer, cursor)
        headers.append((name or b"", content))
    if cursor != start + length:
        raise ValueError(f"a record of {length} bytes with {cursor - start} bytes in it")
    return RawRecord(
        topic=tp.topic,
        partition=tp.partition,
        offset=batch.base_offset + offset_delta,
        timestamp=batch.first_timestamp + time_delta,
        key=key,
        value=value,
        headers=tuple((name.decode("utf-8", "backslashreplace"), content) for name, content in headers),
        raw_names=tuple(name for name, _ in headers),
    ), cursor


def _chunk(buffer: bytes, cursor: int) -> tuple[bytes | None, int]:
    length, cursor = decode_varint(buffer, cursor)
    if length < 0:
        return None, cursor
    if cursor + length > len(buffer):
        raise ValueError(f"{length} bytes at {cursor} of {len(buffer)}")
    return buffer[cursor : cursor + length], cursor + length
