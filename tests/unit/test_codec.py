"""The codec: schema evolution, the two kinds of refusal, packed arrays."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from odradek.streams import codec
from odradek.streams.errors import DecodeError, UnknownEventType
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import SessionResumed, TurnSampled
from odradek.streams.events.tasks import TaskPublished

META = Meta(origin="eval", seq=3, epoch=9, subject="ann")


def test_unknown_fields_are_ignored_and_missing_ones_take_their_defaults() -> None:
    value = msgspec.msgpack.encode({"body": {"session_id": "s", "from_the_future": [1, 2]}, "also_new": True})
    assert codec.decode(value, "session.resumed.v1") == (Meta(), SessionResumed(session_id="s"))


def test_the_decoder_is_chosen_by_the_type_before_decoding() -> None:
    value = codec.encode(SessionResumed(session_id="s"), META)
    with pytest.raises(DecodeError, match=r"session\.opened\.v1"):
        codec.decode(value, "session.opened.v1")


def test_an_unknown_type_is_not_poison() -> None:
    with pytest.raises(UnknownEventType, match="upgrade readers"):
        codec.decode(b"\xc1", "session.imagined.v7")


@pytest.mark.parametrize(
    "value",
    [None, b"", b"\xc1", b"\x80", b"{}", b'{"body": 3}', b'{"body": {"task_id": 3}}', b'{"body": {"task_id": "\xfe"}}'],
)
@pytest.mark.parametrize("content_type", [codec.MSGPACK, codec.JSON])
def test_bad_bytes_are_a_decode_error_that_names_the_type(value: bytes | None, content_type: str) -> None:
    with pytest.raises(DecodeError, match=r"task\.published\.v1"):
        codec.decode(value, "task.published.v1", content_type)


def test_a_decode_error_repeats_no_content() -> None:
    value = msgspec.json.encode({"body": {"task_id": "t", "instruction": "i", "purpose": "tell-tale"}})
    with pytest.raises(DecodeError) as caught:
        codec.decode(value, "task.published.v1", codec.JSON)
    assert "tell-tale" not in str(caught.value)
    assert "purpose" in str(caught.value)


def test_json_and_msgpack_have_the_same_schema() -> None:
    task = TaskPublished(task_id="t", instruction="i", files={"a.py": "x = 1\n"}, attempts=2)
    as_json = codec.encode(task, META, codec.JSON)
    assert codec.decode(as_json, "task.published.v1", codec.JSON) == (META, task)
    assert codec.decode(codec.encode(task, META), "task.published.v1") == (META, task)


def test_every_registered_type_is_named_by_its_tag() -> None:
    assert len(codec.registry()) > 30
    for name, kind in codec.registry().items():
        assert kind.__struct_config__.tag == name
        assert re.fullmatch(r"[a-z][a-z0-9_.]*\.v[0-9]+", name)


class TestUpcasters:
    def test_an_older_version_runs_through_pure_steps_to_the_newest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Renamed(msgspec.Struct, tag="renamed.v3"):
            session: str
            note: str

        def first(body: dict[str, Any]) -> dict[str, Any]:
            return {"session": body["id"]}

        def second(body: dict[str, Any]) -> dict[str, Any]:
            return body | {"note": "from v2"}

        monkeypatch.setattr(codec, "registry", lambda: {"renamed.v3": Renamed})
        monkeypatch.setitem(codec.UPCASTERS, ("renamed", 1), first)
        monkeypatch.setitem(codec.UPCASTERS, ("renamed", 2), second)
        value = msgspec.msgpack.encode({"meta": {"seq": 5}, "body": {"type": "renamed.v1", "id": "s"}})
        assert codec.decode(value, "renamed.v1") == (Meta(seq=5), Renamed("s", "from v2"))

    def test_a_chain_that_ends_in_nothing_is_an_unknown_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(codec.UPCASTERS, ("lost", 1), lambda body: body)
        with pytest.raises(UnknownEventType, match=r"lost\.v2"):
            codec.decode(msgspec.msgpack.encode({"body": {}}), "lost.v1")


class TestPackedArrays:
    def test_bytes_are_little_endian(self) -> None:
        assert codec.i32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
        assert codec.f32([1.0, -0.5]) == b"\0\0\x80\x3f\0\0\0\xbf"

    def test_a_broken_array_is_a_decode_error(self) -> None:
        with pytest.raises(DecodeError, match="5 bytes"):
            codec.read_i32(b"12345")

    def test_a_turn_keeps_its_tokens_and_log_probs_exactly(self) -> None:
        turn = TurnSampled(
            turn=0,
            position=0,
            prompt=codec.i32(range(300)),
            completion=codec.i32([7, 8]),
            logprobs=codec.f32([-0.1, -2.3]),
            spans=[],
            numerics_id="n",
            finish_reason="stop",
        )
        _, body = codec.decode(codec.encode(turn, META), "turn.sampled.v1")
        assert body == turn
        assert codec.read_i32(body.prompt) == list(range(300))
