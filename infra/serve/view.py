"""A session's events as lines that a person wants to read. Pure.

Model text as it is, reads in one line, edits as unified diffs, commands with their output. What the model or a file
says is shown with its control characters written out, so that no text can move the cursor, change colours or hide what
follows. Nothing here decides anything; the same events give the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from odradek.actors.environment.delta import Delta
from odradek.actors.policy.template import ChatTemplate
from odradek.infra.serve.changes import apply_delta, as_diff, compare, with_directories
from odradek.infra.serve.select import BY_PRODUCTS
from odradek.infra.serve.snapshot import Node, Tree
from odradek.infra.shown import clean
from odradek.streams.codec import read_i32
from odradek.streams.events.sessions import (
    CancelRequested,
    ContextSummarized,
    EndReason,
    EnvironmentOpened,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)

OUTPUT_LINES = 40
"""Lines of one command's output that are shown. Too few hide the failure; too many push everything else away. The whole
is in `odradek session show`."""

ARGUMENT_CHARACTERS = 120
"""Characters of an argument in a one-line summary."""

Style = Literal["text", "note", "command", "output", "error", "add", "remove", "hunk", "head"]

ENDS: Mapping[EndReason, str] = {
    "done": "the agent says it is done",
    "no_call": "the agent stopped without saying that it is done",
    "turns": "the budget of turns is used up",
    "context": "the context is full",
    "turn_length": "a turn was cut at its length limit",
    "wall_clock": "the time is used up",
    "cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the story."""

    style: Style
    text: str


def diff_lines(diff: str) -> list[Line]:
    """A unified diff, a style a line."""
    return [Line(_diff_style(line), clean(line)) for line in diff.split("\n")[:-1]] if diff else []


def _diff_style(line: str) -> Style:
    if line.startswith(("diff ", "--- ", "+++ ")):
        return "head"
    starts: Mapping[str, Style] = {"+": "add", "-": "remove", "@": "hunk"}
    return starts.get(line[:1], "text")


@dataclass(slots=True)
class View:
    """Tells one session. `waiting_for` is what it waits for after the last event told."""

    template: ChatTemplate
    copied: Tree
    waiting_for: str = "the session to open"
    _tree: dict[str, Node] = field(default_factory=dict)
    _asked: dict[str, ToolRequested] = field(default_factory=dict)
    _open: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tree = with_directories(self.copied)

    def tell(self, body: SessionEvent, delta: Delta | None = None) -> list[Line]:
        """The lines of one event that counts. `delta`: that of a completed call, contents fetched."""
        match body:
            case MessageReceived():
                self.waiting_for = "the model"
                return [Line("head", f"> {line}") for line in clean(body.text).split("\n")]
            case TurnSampled():
                return self._turn(body)
            case ToolRequested():
                return self._request(body)
            case ToolCompleted():
                return self._result(body, delta)
            case _:
                return self._milestone(body)

    def _milestone(self, body: SessionEvent) -> list[Line]:
        match body:
            case EnvironmentOpened(rebuilt=True):
                return [Line("note", "the workspace was rebuilt from the log; what ran in the background is gone")]
            case SessionResumed():
                return [Line("note", "a failure of ours: the session goes on from its last logged step")]
            case ContextSummarized():
                by = "the agent" if body.source == "model" else "the harness"
                return [Line("note", f"the context was full: {by} summed it up")]
            case CancelRequested():
                return [Line("note", "cancelling")]
            case SessionCompleted():
                turns = f"{body.usage.turns} turn{'s' * (body.usage.turns != 1)}"
                calls = f"{body.usage.calls} call{'s' * (body.usage.calls != 1)}"
                return [Line("note", f"{ENDS[body.reason]} ({turns}, {calls})")]
            case SessionFailed(cause=""):  # all that may be written of somebody who was erased
                return [Line("error", "the session has ended: its subject was erased")]
            case SessionFailed():
                return [Line("error", f"the session failed on our side: {clean(body.cause)}")]
            case _:
                return []

    def _turn(self, body: TurnSampled) -> list[Line]:
        text = self.template.parse(read_i32(body.completion)).text.strip()
        return [Line("text", line) for line in clean(text).split("\n")] if text else []

    # -- calls --------------------------------------------------------------------------------------------------------

    def _request(self, body: ToolRequested) -> list[Line]:
        self._asked[body.call_id] = body
        self._open.add(body.call_id)
        command = body.arguments.get("command")
        self.waiting_for = f"$ {_short(command)}" if command else body.name
        if body.name == "run_terminal" and command:
            return [Line("command", f"$ {line}") for line in clean(command).split("\n")]
        return []

    def _result(self, body: ToolCompleted, delta: Delta | None) -> list[Line]:
        self._open.discard(body.call_id)
        if not self._open:
            self.waiting_for = "the model"
        asked = self._asked.get(body.call_id)
        name, arguments = (asked.name, asked.arguments) if asked is not None else ("", {})
        lines = _summary(name, arguments, body)
        return lines + (self._changed(delta) if delta is not None else [])

    def _changed(self, delta: Delta) -> list[Line]:
        before, self._tree = self._tree, apply_delta(self._tree, delta)
        found = compare(before, self._tree, lambda paths: set(BY_PRODUCTS.match_files(paths)))
        return diff_lines(as_diff(found.changes))


def _summary(name: str, arguments: Mapping[str, str], body: ToolCompleted) -> list[Line]:
    if name == "run_terminal":
        return _output(body)
    if body.is_error:
        return [Line("error", f"{clean(name) or 'call'} {_subject(name, arguments)}: {_short(_first(body.text))}")]
    told: Callable[[Mapping[str, str], str], str] | None = _TOLD.get(name)
    if told is not None:
        return [Line("note", told(arguments, body.text))]
    return [Line("note", f"{clean(name)} {_subject(name, arguments)}".rstrip())]


def _output(body: ToolCompleted) -> list[Line]:
    lines = clean(body.text).rstrip("\n").split("\n")
    if len(lines) > OUTPUT_LINES:
        half = OUTPUT_LINES // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} more lines …", *lines[-half:]]
    style: Style = "error" if body.is_error else "output"
    return [Line(style, f"  {line}") for line in lines]


def _subject(name: str, arguments: Mapping[str, str]) -> str:
    for key in ("path", "pattern", "query", "command"):
        if arguments.get(key):
            return _short(arguments[key])
    return ""


def _short(text: str) -> str:
    line = clean(" ".join(text.split()))
    return line if len(line) <= ARGUMENT_CHARACTERS else line[: ARGUMENT_CHARACTERS - 1] + "…"


def _first(text: str) -> str:
    return (text.splitlines() or [""])[0]


def _count(text: str, thing: str) -> str:
    number = 0 if text.startswith("no match") else len(text.splitlines())
    return f"{number} {thing}{'s' * (number != 1)}"


_TOLD: Mapping[str, Callable[[Mapping[str, str], str], str]] = {
    "read_file": lambda a, text: f"read {_short(a.get('path', ''))} ({_count(text, 'line')})",
    "list_dir": lambda a, text: f"listed {_short(a.get('path', '.'))} ({_count(text, 'line')})",
    "glob": lambda a, text: f"looked for {_short(a.get('pattern', ''))} ({_count(text, 'line')})",
    "grep": lambda a, text: f"searched for {_short(a.get('pattern', ''))} ({_count(text, 'line')})",
    "semantic_search": lambda a, text: f"searched for {_short(a.get('query', ''))} ({_count(text, 'line')})",
    "read_lints": lambda a, text: f"checked {_short(a.get('path', '.'))} ({_count(text, 'line')})",
    "edit_file": lambda a, _text: f"edited {_short(a.get('path', ''))}",
    "write_file": lambda a, _text: f"wrote {_short(a.get('path', ''))}",
    "todo_write": lambda a, _text: "wrote down what is to do",
}
