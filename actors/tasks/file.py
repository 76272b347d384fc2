"""A task as one file: the body of a `task.published.v1` event in JSON or TOML, as a foreign client would send it.

Stricter than the log's own decoder, because a person wrote it: an unknown field is an error with its line, never
ignored. `{"body": {...}}`, the whole value of a record, is accepted too.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec.inspect import ListType, Metadata, StructType, Type, UnionType, type_info

from odradek.actors.tasks.config import line_of_field, read_bytes, toml_fault
from odradek.actors.tasks.errors import TaskFileError
from odradek.streams.events.tasks import TaskPublished

SUFFIXES = (".json", ".toml")


def load_task_file(path: Path) -> TaskPublished:
    """Read one. Raises `TaskFileError`, one line naming file and line."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskFileError(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error
    value = _parsed(path, text)
    if isinstance(value, dict) and isinstance(value.get("body"), dict) and "task_id" not in value:
        value = value["body"]
    unknown = _unknown_field(value, type_info(TaskPublished), "$")
    if unknown is not None:
        where, name = unknown
        reason = f"unknown field `{name}` - at `{where}`"
        raise TaskFileError(path, line_of_field(text, reason), reason)
    try:
        return msgspec.convert(value, TaskPublished)
    except msgspec.ValidationError as error:
        raise TaskFileError(path, line_of_field(text, str(error)), str(error)) from error


def _parsed(path: Path, text: str) -> Any:
    if path.suffix not in SUFFIXES:
        raise TaskFileError(path, None, f"is neither a directory nor a {' or '.join(SUFFIXES)} file")
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskFileError(path, *toml_fault(str(error), text)) from error
    except json.JSONDecodeError as error:
        raise TaskFileError(path, error.lineno, f"{error.msg} (column {error.colno})") from error


def _unknown_field(value: Any, kind: Type, where: str) -> tuple[str, str] | None:
    """(place, name) of the first key that its struct does not have."""
    if isinstance(kind, Metadata):
        return _unknown_field(value, kind.type, where)
    if isinstance(kind, UnionType):
        structs = [one for one in kind.types if isinstance(one, StructType)]
        return _unknown_field(value, structs[0], where) if structs and isinstance(value, dict) else None
    if isinstance(kind, ListType) and isinstance(value, list):
        found = (_unknown_field(item, kind.item_type, f"{where}[{at}]") for at, item in enumerate(value))
        return next((one for one in found if one is not None), None)
    if not (isinstance(kind, StructType) and isinstance(value, dict)):
        return None
    fields = {field.encode_name: field.type for field in kind.fields}
    for name, inner in value.items():
        if name not in fields and name != kind.tag_field:
            return where, name
        deeper = _unknown_field(inner, fields[name], f"{where}.{name}") if name in fields else None
        if deeper is not None:
            return deeper
    return None
