"""From the text of a call's arguments to a tool's struct. Pure.

Values arrive as text, because that is what a model writes between two argument tokens. A field typed as text takes it
byte for byte (indentation and the last newline are the edit); a number or a flag is read from it, anything else is
JSON. An unknown name is refused rather than dropped: a typo that is ignored teaches the model that it was obeyed.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from odradek.actors.tools.errors import BadArguments

A = TypeVar("A", bound=msgspec.Struct)


def parse(tool: str, kind: type[A], arguments: Mapping[str, str]) -> A:
    """The tool's arguments, or `BadArguments` naming the argument at fault and what would be right."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    hints = get_type_hints(kind)
    for name in arguments:
        if name not in fields:
            near = difflib.get_close_matches(name[:80], fields, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise BadArguments(f"{tool} has no argument {name[:80]!r}{hint}; it takes {_list(fields)}")
    missing = [name for name, field in fields.items() if field.required and name not in arguments]
    if missing:
        raise BadArguments(f"{tool} needs {_list(missing)}; it takes {_list(fields)}")
    values = {name: _value(tool, name, hints[fields[name].name], text) for name, text in arguments.items()}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise BadArguments(f"{tool}: {error}") from error


def _value(tool: str, name: str, wanted: object, text: object) -> object:
    if not isinstance(text, str):  # a gateway client may send JSON values where text is expected
        text = msgspec.json.encode(text).decode()
    options = get_args(wanted) if get_origin(wanted) in (Union, type(int | None)) else (wanted,)
    if str in options:
        return text
    try:
        if any(option in (int, float, bool) for option in options):
            return msgspec.convert(text.strip(), wanted, strict=False)
        return msgspec.json.decode(text, type=wanted)
    except msgspec.DecodeError as error:
        raise BadArguments(f"{tool}: {name}: {error}; got {text[:80]!r}") from error


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "no arguments"
