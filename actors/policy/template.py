"""The default ("xml") chat template: how a session is written in tokens and how tool calls are read from them.

    <task> TEXT <agent>   TEXT <call:TOOL> <arg:KEY> VALUE ... </call> ... <end>   <result> TEXT </result> ... <agent>

A condensed context begins anew: the first prompt, later requests, the summary as one more <task>, the turns kept.

Special tokens come only from here or from the sampler; every text goes through `Tokenizer.encode_text`, which yields
none, so no file, tool output or user text can forge a turn. Calls are parsed from ids, never from text: argument
values come back byte for byte, indentation and last newline included. `parse` never raises: a malformed call is a
`ParsedCall` with `error` set, so that one call always has one result. Pure; the template appends only (a session's
tokens are a prefix of its later tokens).
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from odradek.actors.policy.tokenizer import Tokenizer

TOOL_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "read_file": ("path", "offset", "limit"),
    "list_dir": ("path",),
    "glob": ("pattern", "path"),
    "grep": ("pattern", "path"),
    "semantic_search": ("query",),
    "edit_file": ("path", "old", "new"),
    "write_file": ("path", "content"),
    "run_terminal": ("command", "timeout", "background", "job", "stop"),
    "read_lints": ("path",),
    "todo_write": ("items",),
}
"""The ten tools and the order in which their arguments are written."""

ARGUMENT_KEYS: tuple[str, ...] = tuple(dict.fromkeys(key for keys in TOOL_ARGUMENTS.values() for key in keys))

SPECIALS: tuple[str, ...] = (
    "<pad>",
    "<task>",
    "<agent>",
    "<end>",
    "<result>",
    "</result>",
    "<done>",
    "</call>",
    *(f"<call:{tool}>" for tool in TOOL_ARGUMENTS),
    *(f"<arg:{key}>" for key in ARGUMENT_KEYS),
)
"""Every special token, in id order from 0."""


class Call(msgspec.Struct, frozen=True):
    """A tool call to be written."""

    name: str
    arguments: dict[str, str]


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call as read from a turn; `error` says what is malformed (then it must not be run)."""

    name: str
    arguments: dict[str, str]
    error: str | None = None


class ParsedTurn(msgspec.Struct, frozen=True):
    """A sampled turn: its free text, its calls in order, and whether the agent declared the task done."""

    text: str
    calls: list[ParsedCall]
    done: bool


class ChatTemplate(Protocol):
    """What a session needs of a template; a template that rewrites history must open a new segment instead."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def open(self, text: str) -> list[int]: ...

    def user(self, text: str) -> list[int]: ...

    def results(self, results: Sequence[str]) -> list[int]: ...

    def note(self, title: str, ids: Sequence[int]) -> list[int]: ...

    def text(self, text: str) -> list[int]: ...

    def text_ids(self, completion_ids: Sequence[int]) -> list[int]: ...

    def parse(self, completion_ids: Sequence[int]) -> ParsedTurn: ...


class XmlTemplate:
    """The template of the demo policy, over any tokenizer that has `SPECIALS`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = {name: tokenizer.special_id(name) for name in SPECIALS}
        self._task, self._agent, self._end = ids["<task>"], ids["<agent>"], ids["<end>"]
        self._result, self._result_end = ids["<result>"], ids["</result>"]
        self._done, self._call_end = ids["<done>"], ids["</call>"]
        self._call_ids = {tool: ids[f"<call:{tool}>"] for tool in TOOL_ARGUMENTS}
        self._arg_ids = {key: ids[f"<arg:{key}>"] for key in ARGUMENT_KEYS}
        self._tools = {number: tool for tool, number in self._call_ids.items()}
        self._keys = {number: key for key, number in self._arg_ids.items()}

    @property
    def stop_ids(self) -> frozenset[int]:
        """A sampled `<end>` ends a turn."""
        return frozenset((self._end,))

    def open(self, text: str) -> list[int]:
        """The first prompt of a session."""
        return self.user(text)

    def user(self, text: str) -> list[int]:
        """A user's message, and the agent's turn opened."""
        return [self._task, *self.tokenizer.encode_text(text), self._agent]

    def results(self, results: Sequence[str]) -> list[int]:
        """The results of a turn's calls in call order, and the agent's next turn opened."""
        ids: list[int] = []
        for text in results:
            ids += [self._result, *self.tokenizer.encode_text(text), self._result_end]
        return [*ids, self._agent]

    def note(self, title: str, ids: Sequence[int]) -> list[int]:
        """Something the harness tells: a title, then ordinary ids as they are. The agent's turn is opened."""
        return [self._task, *self.tokenizer.encode_text(f"{title}\n"), *ids, self._agent]

    def text(self, text: str) -> list[int]:
        """Ordinary ids of a text."""
        return self.tokenizer.encode_text(text)

    def text_ids(self, completion_ids: Sequence[int]) -> list[int]:
        """The ids of a turn's free text, as they were sampled: what `parse` gives as text."""
        return self._read(completion_ids).text_ids

    def turn(self, calls: Sequence[Call] = (), text: str = "", done: bool = False) -> list[int]:
        """An agent's turn as the sampler would write it: demonstrations and tests only."""
        ids = self.tokenizer.encode_text(text)
        for call in calls:
            ids += self.call(call.name, call.arguments)
        return [*ids, self._done, self._end] if done else [*ids, self._end]

    def call(self, name: str, arguments: Mapping[str, str]) -> list[int]:
        """One call in tokens."""
        ids = [self._call_ids[name]]
        for key, value in arguments.items():
            ids += [self._arg_ids[key], *self.tokenizer.encode_text(value)]
        return [*ids, self._call_end]

    def parse(self, completion_ids: Sequence[int]) -> ParsedTurn:
        """Read a turn from its sampled ids, up to the first `<end>`; never raises."""
        return self._read(completion_ids).result()

    def _read(self, completion_ids: Sequence[int]) -> "_TurnReader":
        reader = _TurnReader(self.tokenizer)
        for number in completion_ids:
            if number == self._end:
                break
            if number in self._tools:
                reader.open_call(self._tools[number])
            elif number in self._keys:
                reader.open_argument(self._keys[number])
            elif number == self._call_end:
                reader.close_call()
            elif number == self._done:
                reader.finish()
            else:
                reader.token(number)
        return reader


class _OpenCall:
    """A call being read: the first fault found is the one reported."""

    def __init__(self, name: str, fault: str | None = None) -> None:
        self.name = name
        self.fault = fault
        self.values: list[tuple[str, list[int]]] = []

    def blame(self, fault: str) -> None:
        self.fault = self.fault or fault


class _TurnReader:
    """States: in text (no open call) or in a call. Every opened call, and every stray call token, ends as one call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text: list[int] = []
        self._calls: list[ParsedCall] = []
        self._open: _OpenCall | None = None
        self._done = False

    @property
    def text_ids(self) -> list[int]:
        return self._text

    def open_call(self, name: str) -> None:
        self._abandon(f"<call:{name}> begins before </call>")
        self._open = _OpenCall(name)

    def open_argument(self, key: str) -> None:
        if self._open is None:
            self._open = _OpenCall("", f"<arg:{key}> outside a call")
        if any(known == key for known, _ in self._open.values):
            self._open.blame(f"argument {key} is given twice")
        self._open.values.append((key, []))

    def close_call(self) -> None:
        if self._open is None:
            self._open = _OpenCall("", "</call> without a call")
        self._close()

    def finish(self) -> None:
        self._abandon("<done> before </call>")
        self._done = True

    def token(self, number: int) -> None:
        special = self._tokenizer.special_name(number)
        ordinary = special is None and 0 <= number < self._tokenizer.vocab_size
        if self._open is None:
            if ordinary:
                self._text.append(number)
        elif not ordinary:
            self._open.blame(f"{special or f'token {number}'} inside a call")
        elif not self._open.values:
            self._open.blame("text before the first argument")
        else:
            self._open.values[-1][1].append(number)

    def result(self) -> ParsedTurn:
        self._abandon("the turn ends before </call>")
        return ParsedTurn(self._tokenizer.decode(self._text), self._calls, self._done)

    def _abandon(self, fault: str) -> None:
        if self._open is not None:
            self._open.blame(fault)
            self._close()

    def _close(self) -> None:
        call, self._open = self._open, None
        assert call is not None
        arguments: dict[str, str] = {}
        for key, ids in call.values:
            data = self._tokenizer.decode_bytes(ids)
            try:
                arguments.setdefault(key, data.decode("utf-8"))
            except UnicodeDecodeError as error:
                # Not every logged or stored form can carry such a text; the call is refused, not repaired.
                call.blame(f"argument {key} is not valid UTF-8 at byte {error.start}")
                arguments.setdefault(key, data.decode("utf-8", "replace"))
        self._calls.append(ParsedCall(call.name, arguments, call.fault))
