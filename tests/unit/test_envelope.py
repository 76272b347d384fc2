"""The envelope: CloudEvents binary mode, deterministic ids, headers of unknown origin."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from odradek.streams import codec
from odradek.streams.envelope import Event, Headers, Record, decode, encode, event_id
from odradek.streams.errors import DecodeError, StreamError, UnknownEventType
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import SessionResumed
from odradek.streams.events.tasks import TaskPublished

REF = RecordRef(topic="sessions.v1", partition=3, offset=41)
OPEN = RecordRef(topic="tasks.v1", partition=0, offset=7)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
EVENT = Event.of(
    SessionResumed(session_id="s"),
    id=event_id("s", 1),
    source="session/s",
    meta=Meta(seq=1, epoch=41),
    traceparent=TRACE,
)


def test_an_event_survives_its_headers_and_value() -> None:
    assert decode(*encode(EVENT), REF) == EVENT


def test_headers_are_cloudevents_binary_mode_with_a_bare_traceparent() -> None:
    _, headers = encode(EVENT)
    assert dict(headers) == {
        "ce_specversion": b"1.0",
        "ce_id": event_id("s", 1).encode(),
        "ce_type": b"session.resumed.v1",
        "ce_source": b"session/s",
        "ce_dataschema": b"odradek:schemas/session.resumed.v1",
        "content-type": b"application/msgpack",
        "traceparent": TRACE.encode(),
    }


def test_ids_are_the_same_for_the_same_cause_and_step_only() -> None:
    assert event_id("cause", 1) == "50538baf-8e5b-5c09-9cf6-0dadf1172a82"  # pinned: ids on the log must never change
    assert event_id("cause", 1) == event_id("cause", "1")
    assert len({event_id("a", "b"), event_id("ab"), event_id("a", "b", 0), event_id("b", "a")}) == 4


def with_headers(*headers: tuple[str, bytes | None], ref: RecordRef = REF) -> Event[object]:
    value, own = encode(EVENT)
    return decode(value, (*headers, *own), ref)


class TestForeignHeaders:
    def test_bytes_that_are_not_text_are_kept_raw(self) -> None:
        assert with_headers(("x-odd", b"\xfe\x41\x80"), ("x-null", None)).extra == (
            ("x-odd", b"\xfe\x41\x80"),
            ("x-null", None),
        )

    def test_a_null_value_counts_as_absent(self) -> None:
        assert with_headers(("ce_id", None)).id == EVENT.id

    def test_a_type_that_is_not_text_is_poison_with_coordinates(self) -> None:
        with pytest.raises(DecodeError, match=r"header ce_type is not UTF-8.* at sessions\.v1/3@41"):
            decode(b"", (("ce_type", b"\xfe\x41\x80"),), REF)

    def test_no_type_is_poison(self) -> None:
        with pytest.raises(DecodeError, match="no ce_type"):
            decode(b"", (("ce_type", None),), REF)

    @pytest.mark.parametrize("trace", [b"\xfe", b"", b"00-xyz", TRACE.encode() + b"-more"])
    def test_a_trace_that_is_none_is_ignored(self, trace: bytes) -> None:
        value, headers = encode(EVENT)
        mixed: Headers = (("traceparent", trace), *(one for one in headers if one[0] != "traceparent"))
        assert decode(value, mixed, REF).traceparent is None

    def test_header_names_are_case_insensitive(self) -> None:
        value, headers = encode(EVENT)
        assert decode(value, tuple((name.title(), raw) for name, raw in headers), REF) == EVENT


class TestOpenTopics:
    TASK = TaskPublished(task_id="t", instruction="i")

    def test_json_without_a_content_type_is_recognised(self) -> None:
        event = decode(b'{"body": {"task_id": "t", "instruction": "i"}}', (("ce_type", b"task.published.v1"),), OPEN)
        assert event.body == self.TASK
        assert event.id == event_id("unnamed", "tasks.v1", 0, 7)

    def test_json_is_refused_on_other_topics(self) -> None:
        value = codec.encode(SessionResumed(session_id="s"), Meta(), codec.JSON)
        with pytest.raises(DecodeError, match="content-type"):
            decode(value, (("ce_type", b"session.resumed.v1"), ("content-type", b"application/json")), REF)

    def test_the_tenant_is_the_topics_and_never_the_messages_word(self) -> None:
        value = msgspec.json.encode({"meta": {"tenant": "rich"}, "body": {"task_id": "t", "instruction": "i"}})
        headers: Headers = (("ce_type", b"task.published.v1"), ("content-type", b"application/json; charset=utf-8"))
        assert decode(value, headers, OPEN).meta.tenant == "default"
        theirs = RecordRef(topic="tasks.v1.acme", partition=0, offset=0)
        assert decode(value, headers, theirs).meta.tenant == "acme"


def test_a_record_decodes_once_and_names_its_coordinates_when_it_cannot() -> None:
    value, headers = encode(EVENT)
    record = Record(REF, b"s", value, headers, 0)
    assert record.event is record.event
    assert Record(REF, b"\xfe", value, headers, 0).key == "\\xfe"
    with pytest.raises(UnknownEventType, match=r"sessions\.v1/3@41"):
        _ = Record(REF, b"s", value, (("ce_type", b"none.such.v1"),), 0).event


def subclasses(kind: type[StreamError]) -> list[type[StreamError]]:
    return [kind, *(deeper for one in kind.__subclasses__() for deeper in subclasses(one))]


@pytest.mark.parametrize("kind", subclasses(StreamError))
def test_every_error_crosses_processes_whole(kind: type[StreamError]) -> None:
    error = kind.at("something is off", "sessions.v1", 3, 41, expected="a", found="b")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.coordinates) == (kind, str(error), error.coordinates)
    assert "sessions.v1/3@41" in str(again)


@pytest.mark.parametrize("topic", ["tasks.v1", "feedback.v1", "groups.v1", "weights.v1", "batches.v1", "dlq.v1"])
def test_an_event_whose_type_the_topic_does_not_carry_is_poison_there(topic: str) -> None:
    with pytest.raises(DecodeError, match=rf"session.resumed.v1 does not belong on {topic} at {topic}/0@3"):
        decode(*encode(EVENT), RecordRef(topic, 0, 3))


@pytest.mark.parametrize("depth", [1_500, 100_000])
def test_a_value_nested_too_deeply_is_poison_and_not_a_crash(depth: int) -> None:
    cases = f'[{{"id": "1", "args": {"[" * depth}{"]" * depth}, "want": 1}}]'
    tests = f'{{"module": "m", "function": "f", "cases": {cases}, "fail_to_pass": ["1"]}}'
    value = f'{{"body": {{"task_id": "t", "instruction": "i", "tests": {tests}}}}}'.encode()
    headers: Headers = (("ce_type", b"task.published.v1"), ("content-type", b"application/json"))
    with pytest.raises(DecodeError, match="nested too deeply"):
        decode(value, headers, OPEN)
