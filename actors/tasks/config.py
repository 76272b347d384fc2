"""`task.toml` and `environment/recipe.toml`: their fields, and errors that name the line.

`task.toml` is Harbor's: its tables may hold fields of Harbor that we do not use. Ours are in `[odradek]`, where an
unknown field is refused, as is an unknown table.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from odradek.actors.tasks.errors import TaskFileError
from odradek.actors.tasks.spec import DEFAULT_IMAGE, Limits
from odradek.streams.events.tasks import Budget

T = TypeVar("T")


class Agent(msgspec.Struct, frozen=True):
    """`[agent]`: the wall-clock budget of one attempt."""

    timeout_sec: float = Budget().wall_seconds


class Verifier(msgspec.Struct, frozen=True):
    """`[verifier]`: the wall-clock budget of grading one attempt."""

    timeout_sec: float = Limits().grading_seconds


class Own(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[odradek]`: how the task is run, with the defaults of a published task."""

    attempts: int = Limits().attempts
    priority: int = 0
    deadline_seconds: float = Limits().deadline_seconds
    purpose: Literal["rl", "eval"] = "rl"
    max_turns: int = Budget().max_turns
    max_turn_tokens: int = Budget().max_turn_tokens
    max_context_tokens: int = Budget().max_context_tokens
    tool_seconds: float = Budget().tool_seconds
    labels: dict[str, str] = {}


class TaskToml(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; tables typed `dict` are Harbor's and not used here."""

    schema_version: str = "1.1"
    version: str = ""
    task: dict[str, object] = {}
    metadata: dict[str, object] = {}
    agent: Agent = Agent()
    verifier: Verifier = Verifier()
    environment: dict[str, object] = {}
    solution: dict[str, object] = {}
    source: str = ""
    odradek: Own = Own()

    def limits(self) -> Limits:
        own = self.odradek
        budget = Budget(
            max_turns=own.max_turns,
            max_turn_tokens=own.max_turn_tokens,
            max_context_tokens=own.max_context_tokens,
            wall_seconds=self.agent.timeout_sec,
            tool_seconds=own.tool_seconds,
        )
        return Limits(
            budget=budget,
            grading_seconds=self.verifier.timeout_sec,
            attempts=own.attempts,
            priority=own.priority,
            deadline_seconds=own.deadline_seconds,
            purpose=own.purpose,
        )


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`environment/recipe.toml`: a built image by name or digest, and commands run once in the fresh workspace."""

    image: str = DEFAULT_IMAGE
    setup: list[str] = []


def read_toml(path: Path, kind: type[T]) -> T:
    """Read a TOML file into a struct. Raises `TaskFileError` with the line."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskFileError(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error
    try:
        value = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TaskFileError(path, *toml_fault(str(error), text)) from error
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise TaskFileError(path, line_of_field(text, str(error)), str(error)) from error


def read_bytes(path: Path) -> bytes:
    """The file's content. Raises `TaskFileError` if it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TaskFileError(path, None, "is missing") from None
    except OSError as error:
        raise TaskFileError(path, None, f"cannot be read: {error.strerror}") from error


def toml_fault(message: str, text: str) -> tuple[int, str]:
    """The line and the reason of a TOML error, which tomllib gives as one text."""
    found = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if found:
        return int(found[1]), f"{message[: found.start()]} (column {found[2]})"
    return max(1, len(text.splitlines())), message


def line_of_field(text: str, message: str) -> int | None:
    """The line of the field that a validation message of msgspec names, as well as a search can tell."""
    path = re.search(r"`\$\.?([^`]*)`$", message)
    unknown = re.search(r"unknown field `([^`]+)`", message)
    keys = [key for key in re.split(r"[.\[\]]+", path[1] if path else "") if key and key not in ("...", "$")]
    if unknown:
        keys.append(unknown[1])
    line = None
    lines = text.splitlines()
    start = 0
    for key in keys:
        header_or_key = re.compile(rf'^\s*(?:\[+[^\]]*\b{re.escape(key)}\b[^\]]*\]|"?{re.escape(key)}"?\s*[=.:])')
        found = next((at for at in range(start, len(lines)) if header_or_key.match(lines[at])), None)
        if found is None:
            break
        line, start = found + 1, found
    return line


def toml_value(value: object) -> str:
    """A scalar, a list or an inline table as TOML text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(_escaped(char) for char in value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_value(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"TOML has no {type(value).__name__}")


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08X}"
