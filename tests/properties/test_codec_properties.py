"""Properties of codec and envelope over every event type."""

from __future__ import annotations

import math
import struct

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.streams import codec
from odradek.streams.envelope import Event, decode, encode
from odradek.streams.errors import DecodeError, UnknownEventType
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import ToolCompleted

REF = RecordRef(topic="sessions.v1", partition=0, offset=0)
OPEN = RecordRef(topic="tasks.v1", partition=0, offset=0)
INT32 = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@given(st.lists(INT32))
def test_packed_integers_round_trip(values: list[int]) -> None:
    assert codec.read_i32(codec.i32(values)) == values


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_packed_floats_round_trip_bit_for_bit(values: list[float]) -> None:
    packed = codec.f32(values)
    assert codec.f32(codec.read_f32(packed)) == packed
    assert packed == struct.pack(f"<{len(values)}f", *values)


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-3e38, max_value=3e38))
def test_a_double_is_rounded_once(value: float) -> None:
    (stored,) = codec.read_f32(codec.f32([value]))
    assert math.isclose(stored, value, rel_tol=2**-23, abs_tol=2**-149)


@given(TEXT, st.binary(max_size=40), st.integers(-1, 2**40), TEXT)
def test_text_and_meta_survive_whatever_they_hold(text: str, raw: bytes, epoch: int, subject: str) -> None:
    event = Event.of(
        ToolCompleted(call_id="c", turn=0, index=0, text=text),
        id="i",
        source="s",
        meta=Meta(epoch=epoch, subject=subject),
    )
    value, headers = encode(event)
    assert decode(value, (*headers, ("x", raw)), REF).body.text == text
    assert decode(value, headers, REF) == event


@settings(max_examples=300)
@given(
    st.binary(max_size=200),
    st.lists(
        st.tuples(
            st.sampled_from(["ce_type", "ce_id", "ce_source", "content-type", "traceparent", "x"]),
            st.one_of(
                st.none(),
                st.binary(max_size=20),
                st.sampled_from([b"task.published.v1", b"application/json", b"application/msgpack"]),
            ),
        ),
        max_size=6,
    ),
)
def test_no_bytes_do_more_than_be_refused(value: bytes, headers: list[tuple[str, bytes | None]]) -> None:
    for ref in (REF, OPEN):
        try:
            event = decode(value, tuple(headers), ref)
        except (DecodeError, UnknownEventType):
            continue
        assert event.type in codec.registry()


@given(st.dictionaries(st.text(max_size=8), st.one_of(INT32, TEXT, st.binary(max_size=8)), max_size=5))
def test_fields_of_the_future_change_nothing(future: dict[str, object]) -> None:
    known = {"session_id", "reason", "type"}
    body = {name: value for name, value in future.items() if name not in known}
    value = msgspec.msgpack.encode({"body": {**body, "session_id": "s"}})
    assert codec.decode(value, "session.resumed.v1")[1].session_id == "s"
