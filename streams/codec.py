"""Bytes of an event and back.

The value of a record is `{"meta": Meta, "body": <tagged struct>}` in msgpack, or in JSON with the same schema on the
open topics. The decoder is chosen by `ce_type` before anything is decoded; unknown fields are ignored; an older type
runs through pure upcasters first. An unknown type (`UnknownEventType`: upgrade the reader) and a bad value
(`DecodeError`: poison) are different errors. Number arrays inside events are packed little-endian bytes, made and read
here and nowhere else. Hashes cover such bytes and stored values, never a re-encoding. Content that is encrypted for its
subject is put back before an older type is brought forward, so that upcasters see whole bodies.
"""

import importlib
import pkgutil
import re
import sys
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from odradek.streams import events
from odradek.streams.errors import DecodeError, UnknownEventType
from odradek.streams.events.meta import Meta
from odradek.streams.privacy.content import LOCKED, Reveal, revealed, withheld

B = TypeVar("B")

MSGPACK = "application/msgpack"
JSON = "application/json"

INLINE_LIMIT = 256 * 1024
"""Bytes of an encoded event above which its large part is a claim check. Too low: an object put on each event. Too
high: the log's page cache and every reader's memory fill with content that few need."""

TYPE_PATTERN = re.compile(r"^(?P<name>[a-z][a-z0-9_.]*)\.v(?P<version>[0-9]+)$")

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns the body of version v into that of v+1. Pure: no clock, no client, never changes its argument's bytes."""

UPCASTERS: dict[tuple[str, int], Upcaster] = {}
"""(type name without version, v) -> the step to v+1. Filled beside the struct that replaced the older one."""


class Wire(msgspec.Struct, Generic[B], frozen=True):
    """What a record's value holds."""

    body: B
    meta: Meta = Meta()


def type_of(body: object) -> str:
    """The `ce_type` of a body: its struct's tag."""
    tag = getattr(type(body), "__struct_config__", None) and type(body).__struct_config__.tag  # type: ignore[attr-defined]
    if not isinstance(tag, str):
        raise UnknownEventType(f"{type(body).__name__} is not an event: a tagged struct of odradek.streams.events")
    return tag


@cache
def registry() -> dict[str, type[msgspec.Struct]]:
    """Every event type this build knows, by `ce_type`, in alphabetical order."""
    found: dict[str, type[msgspec.Struct]] = {}
    for module_info in pkgutil.iter_modules(events.__path__):
        module = importlib.import_module(f"{events.__name__}.{module_info.name}")
        for value in vars(module).values():
            if not (isinstance(value, type) and issubclass(value, msgspec.Struct)):
                continue
            tag = value.__struct_config__.tag
            if isinstance(tag, str) and TYPE_PATTERN.match(tag):
                if found.get(tag, value) is not value:
                    raise TypeError(f"two structs have the event type {tag}: {found[tag].__name__}, {value.__name__}")
                found[tag] = value
    return dict(sorted(found.items()))


@cache
def _msgpack_decoder(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(Wire[kind])  # type: ignore[valid-type]


@cache
def _json_decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(Wire[kind])  # type: ignore[valid-type]


_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder(order="deterministic")


def encode(body: msgspec.Struct, meta: Meta, content_type: str = MSGPACK) -> bytes:
    """The value bytes of an event."""
    wire = Wire(body=body, meta=meta)
    return _encoder.encode(wire) if content_type == MSGPACK else _json_encoder.encode(wire)


def decode(
    value: bytes | None, event_type: str, content_type: str = MSGPACK, reveal: Reveal | None = None
) -> tuple[Meta, Any]:
    """Meta and body of a value whose type the envelope named. `reveal` opens content that is encrypted; without it the
    body comes without its content, and its meta says so (`Meta.cipher`)."""
    if value is None:
        raise DecodeError(f"an event of type {event_type} has no value", type=event_type)
    kind = registry().get(event_type)
    try:
        if kind is not None:
            wire = (
                _msgpack_decoder(kind).decode(value) if content_type == MSGPACK else _json_decoder(kind).decode(value)
            )
            return (wire.meta, wire.body) if wire.meta.cipher is None else revealed(wire.meta, wire.body, reveal)
        return _decode_older(value, event_type, content_type, reveal)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(
            f"{len(value)} bytes are not a {event_type} in {content_type}: {_without_content(error)}", type=event_type
        ) from None


def _without_content(error: Exception) -> str:
    """What is wrong and where, without the value itself: errors reach logs, and content must not."""
    if isinstance(error, UnicodeDecodeError):
        return f"invalid {error.encoding} at byte {error.start}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return re.sub(r"(Invalid (?:enum )?value) .*? - ", r"\1 - ", str(error))


def newest(event_type: str) -> str:
    """The type that a recorded one is read as: where its upcasters lead, or itself."""
    match = TYPE_PATTERN.match(event_type)
    if match is None:
        return event_type
    version = int(match["version"])
    while (match["name"], version) in UPCASTERS:
        version += 1
    return f"{match['name']}.v{version}"


def _decode_older(value: bytes, event_type: str, content_type: str, reveal: Reveal | None) -> tuple[Meta, Any]:
    """Runs the upcasters from the recorded version to the newest that this build has."""
    match = TYPE_PATTERN.match(event_type)
    if match is None or (match["name"], int(match["version"])) not in UPCASTERS:
        raise UnknownEventType(
            f"event type {event_type[:80]!r} is unknown to this build: upgrade readers before writers (start the "
            f"release that wrote it again; a type that no release of yours has goes into kafka.foreign_types)",
            type=event_type,
        )
    name, version = match["name"], int(match["version"])
    decode_any = msgspec.msgpack.decode if content_type == MSGPACK else msgspec.json.decode
    wire = decode_any(value, type=Wire[dict[str, Any]])
    meta, body = wire.meta, dict(wire.body)
    found = reveal(meta) if meta.cipher is not None and reveal is not None else LOCKED
    if meta.cipher is not None and isinstance(found, bytes):
        meta, body = msgspec.structs.replace(meta, cipher=None), body | msgspec.msgpack.decode(found)
    while (name, version) in UPCASTERS:
        body = UPCASTERS[name, version](body)
        version += 1
    body["type"] = newest(event_type)
    kind = registry().get(body["type"])
    if kind is None:
        raise UnknownEventType(f"the upcasters of {event_type} end at {body['type']}, which this build lacks")
    whole = msgspec.convert(body, kind)
    return meta, whole if meta.cipher is None else withheld(whole, meta.cipher.lengths, str(found))


def i32(values: Iterable[int]) -> bytes:
    """Integers as packed little-endian int32 (token ids)."""
    return _packed("i", values)


def f32(values: Iterable[float]) -> bytes:
    """Numbers as packed little-endian float32 (log-probs), rounded once."""
    return _packed("f", values)


def read_i32(data: bytes) -> list[int]:
    """The integers of `i32` bytes."""
    return list(_unpacked("i", data))


def read_f32(data: bytes) -> list[float]:
    """The numbers of `f32` bytes, exactly."""
    return list(_unpacked("f", data))


def _packed(code: str, values: Iterable[Any]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(code: str, data: bytes) -> "array[Any]":
    unpacked = array(code)
    if len(data) % unpacked.itemsize:
        raise DecodeError(f"{len(data)} bytes are not a packed array of {unpacked.itemsize}-byte numbers")
    unpacked.frombytes(data)
    if sys.byteorder == "big":
        unpacked.byteswap()
    return unpacked
