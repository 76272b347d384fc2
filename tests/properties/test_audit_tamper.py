"""Guarantee 10, tamper evidence: changing, dropping, reordering or truncating records is detected and located.

Hundreds of partitions with arbitrary keys, values, headers, times and gaps between offsets; one thing is done to each,
and the check must name the first offset that is not as anchored. How a stored segment is really rewritten is tried in
`tests/contract/test_audit_segments.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.audit_world import PLACE, anchored, checked, partitions

from odradek.streams.audit.check import PartitionCheck
from odradek.streams.envelope import Record
from odradek.streams.events.meta import RecordRef

many = settings(max_examples=60, deadline=None)
intervals = st.integers(1, 9)


def flipped(data: bytes, draw: Callable[..., int]) -> bytes:
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]


@many
@given(records=partitions(), interval=intervals, later=partitions(0, 4))
def test_an_untouched_partition_verifies_and_what_came_later_is_not_anchored_yet(
    records: list[Record], interval: int, later: list[Record]
) -> None:
    end = records[-1].ref.offset
    later = [replace(one, ref=RecordRef(*PLACE, end + 1 + one.ref.offset)) for one in later]
    check = PartitionCheck(PLACE, anchored(records, interval))
    assert [check.feed(record) for record in [*records, *later]] == [None] * (len(records) + len(later))
    assert check.finish(end + 100) is None
    assert (check.verified, check.not_anchored) == (len(records), len(later))


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_one_changed_byte_is_located(records: list[Record], interval: int, data: st.DataObject) -> None:
    """Of key, value, a header's name or content, or the time: whichever has bytes to change."""
    at = data.draw(st.integers(0, len(records) - 1))
    was = records[at]
    changes: dict[str, Callable[[], Record]] = {
        "time": lambda: replace(was, timestamp_ms=was.timestamp_ms ^ (1 << data.draw(st.integers(0, 61)))),
    }
    if was.key_bytes:
        changes["key"] = lambda: replace(was, key_bytes=flipped(was.key_bytes or b"", data.draw))
    if was.value:
        changes["value"] = lambda: replace(was, value=flipped(was.value or b"", data.draw))
    names = [name.encode() for name, _ in was.headers]
    for index, (_, content) in enumerate(was.headers):
        if names[index]:

            def other_name(index: int = index) -> Record:
                raw = [*names[:index], flipped(names[index], data.draw), *names[index + 1 :]]
                shown = tuple(
                    (name.decode("utf-8", "backslashreplace"), c) for name, (_, c) in zip(raw, was.headers, strict=True)
                )
                return replace(was, headers=shown, raw_names=tuple(raw))

            changes[f"name {index}"] = other_name
        if content:

            def other_content(index: int = index, content: bytes = content) -> Record:
                changed = (was.headers[index][0], flipped(content, data.draw))
                return replace(was, headers=(*was.headers[:index], changed, *was.headers[index + 1 :]))

            changes[f"content {index}"] = other_content
    now = changes[data.draw(st.sampled_from(sorted(changes)))]()
    finding = checked(anchored(records, interval), [*records[:at], now, *records[at + 1 :]])
    assert finding is not None
    assert (finding.kind, finding.offset) == ("changed", was.ref.offset)


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_headers_in_another_order_and_nothing_for_empty_are_changes(
    records: list[Record], interval: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(records) - 1))
    was = records[at]
    other = [
        replace(was, headers=tuple(reversed(was.headers))),
        replace(was, headers=was.headers[:-1]),
        replace(was, headers=(*was.headers, ("", None))),
        replace(was, headers=tuple((name, None if content == b"" else content) for name, content in was.headers)),
        replace(was, key_bytes=None if was.key_bytes == b"" else b""),
        replace(was, value=None if was.value == b"" else b""),
        replace(was, key_bytes=was.value, value=was.key_bytes),
    ]
    now = data.draw(st.sampled_from(other))
    assume(now != was)
    finding = checked(anchored(records, interval), [*records[:at], now, *records[at + 1 :]])
    assert finding is not None
    assert (finding.kind, finding.offset) == ("changed", was.ref.offset)


def test_bytes_moved_from_one_field_to_the_next_are_a_change() -> None:
    """Lengths are part of what is hashed: the same bytes cut otherwise are other records."""
    ref = RecordRef(*PLACE, 0)
    cuts = [
        Record(ref, b"ab", b"c", (), 0),
        Record(ref, b"a", b"bc", (), 0),
        Record(ref, b"a", b"b", (("c", None),), 0),
        Record(ref, b"a", b"b", (("", b"c"),), 0),
        Record(ref, b"a", b"", (("b", b"c"),), 0),
        Record(ref, b"a", b"", (("b", b""), ("c", b"")), 0),
    ]
    for was in cuts:
        anchors = anchored([was], 1)
        assert [checked(anchors, [now]) is None for now in cuts] == [now is was for now in cuts]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\u00e9".encode(), "e\u0301".encode()),
        (b"\xff", b"\xfe"),
        (b"a\n", b"a\r\n"),
        (b'{"a":1}', b'{"a": 1.0}'),
        (b"A", b"a"),
    ],
)
def test_bytes_that_a_reader_takes_for_the_same_are_a_change(one: bytes, other: bytes) -> None:
    """What is hashed is what lies there: no text is normalised, repaired or encoded again on the way."""
    ref = RecordRef(*PLACE, 0)
    for was, now in (
        (Record(ref, one, b"v", (), 0), Record(ref, other, b"v", (), 0)),
        (Record(ref, b"k", one, (), 0), Record(ref, b"k", other, (), 0)),
        (Record(ref, b"k", b"v", (("h", one),), 0), Record(ref, b"k", b"v", (("h", other),), 0)),
    ):
        assert checked(anchored([was], 1), [was]) is None
        assert checked(anchored([was], 1), [now]) is not None


def test_a_header_name_that_is_no_text_is_not_the_text_that_it_is_shown_as() -> None:
    ref = RecordRef(*PLACE, 0)
    bytes_ff = Record(ref, b"k", b"v", (("\\xff", b"c"),), 0, raw_names=(b"\xff",))
    four_letters = Record(ref, b"k", b"v", (("\\xff", b"c"),), 0)
    assert checked(anchored([bytes_ff], 1), [bytes_ff]) is None
    assert checked(anchored([bytes_ff], 1), [four_letters]) is not None


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_a_dropped_record_is_located(records: list[Record], interval: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(records) - 1))
    end = records[-1].ref.offset + 1
    finding = checked(anchored(records, interval), [*records[:at], *records[at + 1 :]], end)
    assert finding is not None
    assert (finding.kind, finding.offset) == ("dropped", records[at].ref.offset)


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_two_swapped_records_are_located_at_the_first(
    records: list[Record], interval: int, data: st.DataObject
) -> None:
    at, other = sorted(data.draw(st.lists(st.integers(0, len(records) - 1), min_size=2, max_size=2, unique=True)))
    now = list(records)
    now[at] = replace(records[other], ref=records[at].ref)
    now[other] = replace(records[at], ref=records[other].ref)
    assume(now != records)
    finding = checked(anchored(records, interval), now)
    assert finding is not None
    assert (finding.kind, finding.offset) == ("changed", records[at].ref.offset)


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_a_truncated_tail_is_located(records: list[Record], interval: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(records) - 1))
    finding = checked(anchored(records, interval), records[:at])
    assert finding is not None
    assert (finding.kind, finding.offset) == ("truncated", records[at].ref.offset)


@many
@given(records=partitions(), interval=intervals, data=st.data())
def test_a_record_in_the_gap_of_a_marker_is_located(records: list[Record], interval: int, data: st.DataObject) -> None:
    """An aborted record that becomes visible, because somebody changed the marker behind it."""
    there = {record.ref.offset for record in records}
    gaps = [offset for offset in range(records[-1].ref.offset) if offset not in there]
    assume(gaps)
    offset = data.draw(st.sampled_from(gaps))
    extra = replace(data.draw(st.sampled_from(records)), ref=RecordRef(*PLACE, offset))
    now = sorted([*records, extra], key=lambda record: record.ref.offset)
    finding = checked(anchored(records, interval), now)
    assert finding is not None
    assert (finding.kind, finding.offset) == ("inserted", offset)


@many
@given(records=partitions(4), interval=st.integers(1, 2), data=st.data())
def test_an_anchor_that_is_left_out_is_located(records: list[Record], interval: int, data: st.DataObject) -> None:
    anchors = anchored(records, interval)
    at = data.draw(st.integers(0, len(anchors) - 2))
    finding = checked([*anchors[:at], *anchors[at + 1 :]], records)
    assert finding is not None
    assert (finding.kind, finding.offset) == ("anchor", anchors[at - 1].last + 1 if at else 0)


@pytest.mark.parametrize("field", ["root", "chain"])
def test_marks_alone_do_not_vouch_for_an_interval(field: str) -> None:
    """Marks are 8 bytes of each leaf; what is signed as root and chain has to fit whole."""
    records = [Record(RecordRef(*PLACE, offset), b"k", b"v", (), 0) for offset in range(3)]
    (anchor,) = anchored(records, 3)
    other = msgspec.structs.replace(anchor, **{field: "00" * 32})
    finding = checked([other], records)
    assert finding is not None
    assert (finding.kind, finding.offset) == ("changed", 0)
