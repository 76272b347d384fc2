"""The tolerant parser of record batches: what the client library can't read is read, or refused with coordinates."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from aiokafka import TopicPartition
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st
from support.segment import COUNT_AT, COVERED_AT, StoredBatch

from odradek.streams.errors import DecodeError
from odradek.streams.rawrecords import parse

TP = TopicPartition("t", 3)
PRODUCER = 7


def batch(
    values: Sequence[bytes], base: int = 0, *, compression: int = 0, transactional: bool = False, name: str = "nnn"
) -> StoredBatch:
    """As a producer makes it and a broker stores it."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=int(transactional),
        producer_id=PRODUCER if transactional else -1,
        producer_epoch=0 if transactional else -1,
        base_sequence=0 if transactional else -1,
        batch_size=1 << 20,
    )
    for number, value in enumerate(values):
        builder.append(number, 1000 + number, b"k", value, [(name, b"c")])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, 0, base)
    return StoredBatch(bytes(data)).sealed()


def values(data: bytes, position: int, aborted: Sequence[tuple[int, int]] = ()) -> tuple[list[bytes | None], int]:
    records, following = parse(data, TP, position, list(aborted))
    return [record.value for record in records], following


def test_header_names_are_shown_escaped_and_kept_as_stored() -> None:
    stored = batch([b"a", b"b"])
    at = stored.data.index(b"nnn")
    bad = StoredBatch(stored.data[:at] + b"\xfe\x41\x80" + stored.data[at + 3 :]).sealed()
    records, following = parse(bad.data, TP, 0, [])
    assert [record.headers for record in records] == [(("\\xfeA\\x80", b"c"),), (("nnn", b"c"),)]
    assert [record.raw_names for record in records] == [(b"\xfe\x41\x80",), (b"nnn",)]
    assert [(record.offset, record.timestamp) for record in records] == [(0, 1000), (1, 1001)]
    assert following == 2


def test_only_the_batch_of_the_position_is_read_from_there_on() -> None:
    data = batch([b"a"], 0).data + batch([b"b", b"c"], 1).data + batch([b"d"], 3).data
    assert values(data, 2) == ([b"c"], 3)
    assert values(data, 3) == ([b"d"], 4)


def test_a_committed_batch_is_not_hidden_by_an_aborted_one_of_the_same_producer() -> None:
    """The broker names transactions that end later; one that began behind a batch says nothing of it."""
    committed, undone = batch([b"kept"], 0, transactional=True), batch([b"gone"], 2, transactional=True)
    data = committed.data + undone.data
    assert values(data, 0, [(PRODUCER, 2)]) == ([b"kept"], 1)
    assert values(data, 2, [(PRODUCER, 2)]) == ([], 3)
    assert values(data, 2, [(PRODUCER + 1, 2)]) == ([b"gone"], 3)


def test_a_batch_that_fails_its_checksum_is_refused_with_its_coordinates() -> None:
    data = batch([b"a"], 0).data + batch([b"b"], 1).flipped(70, 1).data
    with pytest.raises(DecodeError, match="fails its checksum at t/3@1"):
        values(data, 1)


@pytest.mark.parametrize("compression", [0, 4])
def test_damage_under_a_right_checksum_is_refused_with_its_coordinates(compression: int) -> None:
    """Compressed bytes that are none, or a count and lengths that lead nowhere."""
    stored = batch([b"a" * 50, b"b" * 50], 5, compression=compression)
    broken = stored.flipped(64, 0xFF).sealed() if compression else stored.flipped(COUNT_AT + 3, 0x40).sealed()
    with pytest.raises(DecodeError, match=r"record batch can't be read \(\w+\) at t/3@5"):
        values(broken.data, 5)


def test_no_whole_batch_is_refused() -> None:
    with pytest.raises(DecodeError, match="no whole record batch at t/3@0"):
        values(batch([b"a"]).data[:-1], 0)


@settings(max_examples=200, deadline=None)
@given(at=st.integers(COVERED_AT, 200), bits=st.integers(1, 255), compression=st.sampled_from([0, 4]))
def test_whatever_byte_is_damaged_the_answer_is_records_or_coordinates(at: int, bits: int, compression: int) -> None:
    stored = batch([bytes([n]) * 20 for n in range(5)], compression=compression)
    broken = stored.flipped(at % (len(stored.data) - COVERED_AT) + COVERED_AT, bits).sealed()
    try:
        records, _ = parse(broken.data, TP, 0, [])
    except DecodeError as error:
        assert error.coordinates["topic"] == "t"
    else:
        assert all(record.offset >= 0 for record in records)
