"""An event type's second version, as it will come: records of the first stay on the log and are read as the second.

No type has two versions yet, so this registers one for the time of the test, the way `odradek.streams.codec` says:
turn.sampled.v0 gave the text's ids as a list and one weight version for the whole turn. Its golden bytes are written
down here as that release would have written them.
"""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.lane_world import LaneWorld

from odradek.streams import codec
from odradek.streams.assembly.reader import Extent, read_sequences
from odradek.streams.codec import f32, i32, read_i32
from odradek.streams.errors import SchemaBreak, UnknownEventType
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, TurnSampled, Usage, WeightSpan
from odradek.streams.log import EventLog
from odradek.streams.schemas import generate
from odradek.streams.testing import an_event, event_log, kafka_config

__all__ = ["event_log", "kafka_config"]

GOLDEN_V0 = base64.b64decode(
    "gqRtZXRhgaNzZXEApGJvZHmIpHR5cGWvdHVybi5zYW1wbGVkLnYwpHR1cm4AqHBvc2l0aW9uAKZwcm9tcHSTAQIDqmNvbXBsZXRpb26SBAWobG9n"
    "cHJvYnPECAAAAL8AAIC/p3ZlcnNpb24Cq251bWVyaWNzX2lkpHRlc3Q="
)
"""meta.seq 0; turn 0 at position 0, prompt 1 2 3, completion 4 5, log-probs -0.5 -1, all under version 2."""


def v0_to_v1(body: dict[str, Any]) -> dict[str, Any]:
    """Lists of ids become packed bytes, the one version a span; every turn of that time ended by itself."""
    kept = {name: value for name, value in body.items() if name not in ("version", "prompt", "completion")}
    return kept | {
        "prompt": i32(body["prompt"]),
        "completion": i32(body["completion"]),
        "spans": [[0, body["version"]]],
        "finish_reason": "stop",
    }


@pytest.fixture
def upcaster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(codec.UPCASTERS, ("turn.sampled", 0), v0_to_v1)


@pytest.mark.usefixtures("upcaster")
def test_golden_bytes_of_an_older_version_are_read_as_the_newest() -> None:
    meta, turn = codec.decode(GOLDEN_V0, "turn.sampled.v0")
    assert meta == Meta(seq=0)
    assert turn == TurnSampled(
        turn=0, position=0, prompt=i32([1, 2, 3]), completion=i32([4, 5]), logprobs=f32([-0.5, -1.0]),
        spans=[WeightSpan(0, 2)], numerics_id="test", finish_reason="stop",
    )  # fmt: skip
    assert codec.newest("turn.sampled.v0") == "turn.sampled.v1" == codec.newest("turn.sampled.v1")


@pytest.mark.usefixtures("upcaster")
def test_an_older_version_in_json_keeps_its_bytes() -> None:
    """Where foreign clients write, bytes are base64 text."""
    body = {"turn": 0, "position": 0, "prompt": [], "completion": [4], "version": 2, "numerics_id": "n"}
    value = msgspec.json.encode({"body": body | {"logprobs": f32([-0.5])}})
    _, turn = codec.decode(value, "turn.sampled.v0", codec.JSON)
    assert (turn.logprobs, read_i32(turn.completion)) == (f32([-0.5]), [4])


def test_an_upcaster_changes_nothing_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def watched(body: dict[str, Any]) -> dict[str, Any]:
        before = copy.deepcopy(body)
        made = v0_to_v1(body)
        given.append((before, body))
        return made

    monkeypatch.setitem(codec.UPCASTERS, ("turn.sampled", 0), watched)
    first, second = (codec.decode(GOLDEN_V0, "turn.sampled.v0") for _ in range(2))
    assert first == second and all(before == after for before, after in given) and len(given) == 2


@pytest.mark.contract
@pytest.mark.usefixtures("upcaster")
async def test_a_session_that_an_older_release_wrote_is_assembled(event_log: EventLog) -> None:
    """From the broker to the arrays that are trained, beside a turn of today's version."""
    world = LaneWorld(event_log)
    name = f"{world.lane}.old"
    opened = await event_log.append("sessions.v1", name, an_event(SessionOpened(session_id=name, policy="p")))
    epoch = opened.offset

    def owner(seq: int) -> Meta:
        return Meta(epoch=epoch, seq=seq)

    wire = msgspec.msgpack.decode(GOLDEN_V0)
    old = msgspec.msgpack.encode({"meta": msgspec.to_builtins(owner(0)), "body": wire["body"]})
    headers: list[tuple[str, bytes | None]] = [
        ("ce_type", b"turn.sampled.v0"), ("ce_id", f"{name}/0".encode()), ("content-type", b"application/msgpack"),
    ]  # fmt: skip
    await event_log.append_raw("sessions.v1", name.encode(), old, headers)
    new = TurnSampled(
        turn=1, position=5, prompt=i32([9]), completion=i32([8]), logprobs=f32([-0.25]), spans=[WeightSpan(0, 3)],
        numerics_id="test", finish_reason="stop",
    )  # fmt: skip
    await event_log.append("sessions.v1", name, an_event(new, meta=owner(1)))
    end = SessionCompleted(reason="done", first_offset=epoch, usage=Usage())
    last = await event_log.append("sessions.v1", name, an_event(end, meta=owner(2)))
    found = await read_sequences(event_log, [Extent(name, opened.partition, opened.offset, last.offset)])
    (segment,) = found[name].segments
    assert (list(segment.tokens), list(segment.mask)) == ([1, 2, 3, 4, 5, 9, 8], [0, 0, 0, 1, 1, 0, 1])
    assert list(segment.logprobs) == [0, 0, 0, -0.5, -1, 0, -0.25] and segment.versions[3] == 2


@pytest.mark.contract
async def test_without_its_upcaster_an_older_version_is_no_poison(event_log: EventLog) -> None:
    """The type is unknown, as a newer release's is; nor is it read as something that it is not."""
    name = f"{LaneWorld(event_log).lane}.unknown"
    ref = await event_log.append_raw("sessions.v1", name.encode(), GOLDEN_V0, [("ce_type", b"turn.sampled.v0")])
    with pytest.raises(UnknownEventType, match=rf"turn\.sampled\.v0.* at {ref}"):
        _ = (await event_log.read_ref(ref)).event


def test_a_published_type_that_nothing_reads_any_more_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replacing a struct without an upcaster would leave its records on every log unread."""

    class First(msgspec.Struct, tag="thing.v1"):
        name: str

    class Second(msgspec.Struct, tag="thing.v2"):
        title: str

    monkeypatch.setattr(generate.asyncapi, "document", dict)
    monkeypatch.setattr(codec, "registry", lambda: {"thing.v1": First})
    generate.write(tmp_path)
    monkeypatch.setattr(codec, "registry", lambda: {"thing.v2": Second})
    with pytest.raises(SchemaBreak, match=r"nothing reads any more: thing\.v1.*UPCASTERS"):
        generate.write(tmp_path)
    monkeypatch.setitem(codec.UPCASTERS, ("thing", 1), lambda body: {"title": body["name"]})
    written = generate.write(tmp_path)
    assert "history/thing.v2.jsonl" in written and "events/thing.v1.json (removed)" in written
    assert generate.history("thing.v1", tmp_path) and generate.stale(tmp_path) == []
