"""Committed schemas, their evolution, the AsyncAPI document and the golden bytes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from odradek.streams import codec, topics
from odradek.streams.envelope import decode
from odradek.streams.errors import SchemaBreak
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.schemas import asyncapi, generate, golden
from odradek.streams.schemas.catalog import CATALOG, event_schema
from odradek.streams.schemas.evolution import breaks

GOLDEN = Path(__file__).parents[1] / "golden" / "events"
RENEW = "run: python -m odradek.streams.schemas.generate --golden tests/golden/events"


def test_committed_schemas_are_as_the_code_says_and_break_no_published_one() -> None:
    assert generate.stale() == [], RENEW


@pytest.mark.parametrize("tag", codec.registry())
def test_a_sample_of_each_type_fits_its_schema_as_json(tag: str) -> None:
    schema = event_schema(codec.registry()[tag])
    jsonschema.Draft202012Validator.check_schema(schema)
    for body in golden.samples(codec.registry()[tag]).values():
        value = json.loads(codec.encode(body, golden.META, codec.JSON))
        jsonschema.validate(value, schema)


def golden_lines() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(GOLDEN.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines()):
            found.append((f"{path.stem}#{number}", json.loads(line)))
    return found


def holds(found: Any, meant: Any) -> bool:
    """Whether the decoded value has all that was meant; fields added since are allowed."""
    if isinstance(meant, dict) and isinstance(found, dict):
        return all(name in found and holds(found[name], value) for name, value in meant.items())
    if isinstance(meant, list) and isinstance(found, list):
        return len(found) == len(meant) and all(map(holds, found, meant))
    return type(found) is type(meant) and bool(found == meant)


def place_of(headers: tuple[tuple[str, bytes | None], ...]) -> RecordRef:
    """A place on the topic that carries the type, or what became of it: no other topic takes it."""
    kind = codec.registry()[codec.newest((dict(headers)["ce_type"] or b"").decode())]
    topic = next(topic for topic, kinds in CATALOG.items() if kind in kinds)
    return RecordRef(topic.for_tenant(golden.META.tenant) if topic.per_tenant else topic.name, 0, 0)


@pytest.mark.parametrize("line", [pytest.param(line, id=name) for name, line in golden_lines()])
def test_every_record_ever_written_is_still_read(line: dict[str, Any]) -> None:
    headers = tuple((name, None if raw is None else bytes.fromhex(raw)) for name, raw in line["headers"])
    event = decode(bytes.fromhex(line["value"]), headers, place_of(headers))
    assert holds(msgspec.to_builtins(event.body), line["body"] | {"type": event.type})
    assert (event.meta, event.source, event.traceparent) == (golden.META, "golden", golden.TRACE)


@pytest.mark.parametrize("tag", codec.registry())
def test_todays_bytes_of_each_type_are_among_the_golden_ones(tag: str) -> None:
    path = GOLDEN / f"{tag}.jsonl"
    assert path.exists(), RENEW
    assert set(golden.lines(codec.registry()[tag])) <= set(path.read_text().splitlines()), RENEW


def test_golden_bytes_hold_bytes_as_base64_in_their_readable_form() -> None:
    (full,) = [line for name, line in golden_lines() if name == "turn.sampled.v1#0"]
    assert base64.b64decode(full["body"]["completion"]) == bytes([0, 1, 254, 255])


class TestEvolution:
    class Old(msgspec.Struct, tag="thing.v1", omit_defaults=True):
        name: str
        size: int = 0
        parts: list[Meta] = []

    def schema(self, **fields: Any) -> dict[str, Any]:
        """The old schema with fields added (a type, or a type and its default) or taken away (None)."""
        columns = {"name": (str,), "size": (int, 0), "parts": (list[Meta], msgspec.field(default_factory=list))}
        for field, shape in fields.items():
            if shape is None:
                del columns[field]
            else:
                columns[field] = shape
        ordered = sorted(columns.items(), key=lambda item: len(item[1]))
        kind = msgspec.defstruct("Old", [(name, *shape) for name, shape in ordered], tag="thing.v1")
        return event_schema(kind)

    def found(self, **fields: Any) -> list[str]:
        return breaks(event_schema(self.Old), self.schema(**fields))

    def test_a_new_field_with_a_default_is_allowed(self) -> None:
        assert self.found(colour=(str, "red")) == []

    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"colour": (str,)}, "value.body.colour became required"),
            ({"size": None}, "value.body.size is gone"),
            ({"size": (str, "0")}, "value.body.size: type was 'integer', is 'string'"),
            ({"size": (int, 1)}, "value.body.size: default was 0, is 1"),
            ({"size": (int,)}, "value.body.size became required"),
            ({"name": (str, "")}, "value.body.name is no longer required"),
            ({"parts": (list[str], msgspec.field(default_factory=list))}, "value.body.parts[]: type was"),
        ],
    )
    def test_a_change_that_an_old_reader_or_record_would_not_survive_is_named(
        self, fields: dict[str, Any], what: str
    ) -> None:
        assert any(found.startswith(what) for found in self.found(**fields))

    def test_the_generator_refuses_what_breaks_any_published_schema(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(codec, "registry", lambda: {"thing.v1": self.Old})
        monkeypatch.setattr(asyncapi, "document", dict)
        assert generate.write(tmp_path)
        assert generate.stale(tmp_path) == []

        class Old(msgspec.Struct, tag="thing.v1"):
            name: str

        monkeypatch.setattr(codec, "registry", lambda: {"thing.v1": Old})
        with pytest.raises(SchemaBreak, match=r"thing\.v1.*value\.body\.size is gone"):
            generate.write(tmp_path)
        assert len(generate.history("thing.v1", tmp_path)) == 1


class TestAsyncApi:
    def test_every_topic_is_a_channel_and_every_type_a_message_of_one(self) -> None:
        document = asyncapi.document()
        assert set(document["channels"]) == {row.name for row in topics.ALL}
        carried = [tag for channel in document["channels"].values() for tag in channel["messages"]]
        assert sorted(carried) == list(codec.registry())
        assert set(CATALOG) == set(topics.ALL)

    def test_every_reference_leads_somewhere(self) -> None:
        document = asyncapi.document()
        for channel in document["channels"].values():
            for message in channel["messages"].values():
                name = message["$ref"].removeprefix("#/components/messages/")
                payload = document["components"]["messages"][name]["payload"]["schema"]["$ref"]
                assert (generate.HERE / payload).exists()
