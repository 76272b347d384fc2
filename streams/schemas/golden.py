"""Golden bytes: one file for each event type with records as they were written, by every version that ever wrote them.

A line is one record: value (hex), headers and the body as it was meant. Lines are only added. A test decodes each of
them with today's code and compares; so a change that cannot read yesterday's log fails before it is merged.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from odradek.streams import codec
from odradek.streams.envelope import Event, encode
from odradek.streams.events.meta import Meta

META = Meta(
    origin="eval",
    tenant="acme",
    subject="ann",
    seq=3,
    epoch=41,
    causation="c",
    correlation="g",
    idempotency_key="k",
    time_ms=1_700_000_000_000,
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def samples(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Two records' bodies of a type: with every field filled, and with the required ones only."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    numbers = itertools.count(1)
    full = {field.name: _filled(field.type, field.name, numbers) for field in described.fields}
    bare = {field.name: full[field.name] for field in described.fields if field.required}
    return {"full": kind(**full), "bare": kind(**bare)}


def _filled(described: inspect.Type, name: str, numbers: "itertools.count[int]") -> Any:
    """A value of a described type, told by nothing but the type and a counter: the same on every host."""
    match described:
        case inspect.StrType():
            return f"{name} é"
        case inspect.BytesType():
            return bytes([0, 1, 254, 255])
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return next(numbers)
        case inspect.FloatType():
            return next(numbers) + 0.5
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.NoneType():
            return None
        case inspect.ListType(item_type=item):
            return [_filled(item, name, numbers)]
        case inspect.DictType(key_type=key, value_type=value):
            return {_filled(key, name, numbers): _filled(value, name, numbers)}
        case inspect.StructType(cls=kind, fields=fields):
            return kind(**{field.name: _filled(field.type, field.name, numbers) for field in fields})
        case inspect.UnionType(types=types):
            return _filled(next(one for one in types if not isinstance(one, inspect.NoneType)), name, numbers)
        case inspect.AnyType():
            return {"any": [1, None, "x"]}
    raise TypeError(f"no golden sample for {described} of field {name}: teach odradek.streams.schemas.golden")


def lines(kind: type[msgspec.Struct]) -> list[str]:
    """The lines of a type as today's code writes them."""
    found = []
    for name, body in samples(kind).items():
        event = Event.of(body, id=f"id-{name}", source="golden", meta=META, traceparent=TRACE)
        value, headers = encode(event)
        record = {
            "sample": name,
            "type": event.type,
            "value": value.hex(),
            "headers": [[header, None if raw is None else raw.hex()] for header, raw in headers],
            "body": msgspec.to_builtins(body),
        }
        found.append(json.dumps(record, ensure_ascii=False, sort_keys=True))
    return found


def renew(folder: Path) -> list[str]:
    """Adds what is missing and says what it added. A renewed test input is a decision: the difference is for review."""
    folder.mkdir(parents=True, exist_ok=True)
    added = []
    for tag, kind in codec.registry().items():
        path = folder / f"{tag}.jsonl"
        present = path.read_text().splitlines() if path.exists() else []
        fresh = [line for line in lines(kind) if line not in present]
        if fresh:
            path.write_text("".join(f"{line}\n" for line in (*present, *fresh)))
            added.append(f"{tag}: {len(fresh)} record(s) beside {len(present)}")
    return added
