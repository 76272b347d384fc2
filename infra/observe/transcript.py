"""One session as a person reads it: what was asked, said, called, answered and changed, in log order.

Pure: records in, plain data and text out. Turns are decoded from the logged token ids, nothing is sampled again; file
changes are shown as diffs against what the log says the file held before. Records that the rule of one owner sets
aside are not shown, only counted.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise

import msgspec

from odradek.actors.policy.template import XmlTemplate
from odradek.actors.tools.diff import unified
from odradek.streams.codec import read_f32, read_i32
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import (
    CancelRequested,
    ContextSummarized,
    EnvironmentClosed,
    EnvironmentOpened,
    FileChange,
    MessageReceived,
    SessionCompleted,
    SessionFailed,
    SessionOpened,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.ownership import OwnerRule, SessionRecord
from odradek.streams.privacy.content import WITHHELD

SHOWN_LINES = 60
"""Lines of one result or diff in the text form; the JSON form has all. More buries the turn it belongs to."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    offset: int
    kind: str
    """opened, resumed, message, cancel, environment, turn, call, result, summary, completed, failed, closed."""
    time_ms: int = 0
    text: str = ""
    name: str = ""
    """A call's tool."""
    arguments: dict[str, str] = {}
    turn: int | None = None
    index: int | None = None
    is_error: bool = False
    milliseconds: float = 0.0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    mean_logprob: float | None = None
    versions: list[tuple[int, int]] = []
    """(weight version, tokens sampled under it), in order."""
    finish_reason: str = ""
    diffs: list[str] = []


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """A session, whole."""

    session_id: str
    origin: str
    policy: str
    group_id: str
    attempt: int
    task: str
    """Coordinates of the task's record; empty for a user's session."""
    subject: str
    """Whose session it is, as `odradek subject` names them; empty for nobody's."""
    partition: int
    first_offset: int
    entries: list[Entry]
    ignored: int
    """Records of former owners, or repeated ones: not shown."""
    verdict: RewardAssigned | RewardUngraded | None


def transcript(
    session_id: str,
    partition: int,
    records: Iterable[SessionRecord],
    files: Mapping[str, bytes],
    template: XmlTemplate | None,
    verdict: RewardAssigned | RewardUngraded | None = None,
) -> Transcript | None:
    """None if no record of the session counts. `files`: the workspace at the start, as far as it is known.
    `template` None shows token counts instead of text."""
    reader = _Reader(dict(files), template)
    for record in records:
        reader.take(record)
    opened = reader.opened
    if opened is None:
        return None
    return Transcript(
        session_id=session_id,
        origin=reader.meta.origin,
        subject=reader.meta.subject,
        policy=opened.policy,
        group_id=opened.group_id,
        attempt=opened.attempt,
        task=str(opened.task) if opened.task is not None else "",
        partition=partition,
        first_offset=reader.entries[0].offset,
        entries=reader.entries,
        ignored=reader.rule.ignored,
        verdict=verdict,
    )


class _Reader:
    def __init__(self, files: dict[str, bytes], template: XmlTemplate | None) -> None:
        self.entries: list[Entry] = []
        self.opened: SessionOpened | None = None
        self.meta = Meta()
        self.rule = OwnerRule()
        self._files = files
        self._template = template
        self._cannot_see = False
        """The content of the record in hand was erased, or its key is not here."""

    def take(self, record: SessionRecord) -> None:
        offset, event_id, meta, body = record
        if not self.rule.accepts(offset, event_id, meta, body):
            return
        if isinstance(body, SessionOpened) and self.opened is None:
            self.opened, self.meta = body, meta
            self._files = {**self._files, **body.files}
        self._cannot_see = meta.cipher is not None
        entry = self._entry(offset, meta.time_ms, body)
        if entry is not None:
            self.entries.append(entry)

    def _entry(self, offset: int, time_ms: int, body: object) -> Entry | None:
        def entry(kind: str, text: str = "") -> Entry:
            return Entry(offset=offset, kind=kind, time_ms=time_ms, text=text)

        match body:
            case SessionOpened():
                return entry("opened")
            case SessionResumed():
                return entry("resumed", body.reason)
            case MessageReceived():
                return entry("message", body.text)
            case CancelRequested():
                return entry("cancel", body.reason)
            case EnvironmentOpened():
                how = "rebuilt from the log" if body.rebuilt else "new"
                return entry("environment", f"{body.driver} sandbox {body.sandbox_id}, {how}")
            case EnvironmentClosed():
                return entry("closed", body.sandbox_id)
            case ContextSummarized():
                by = "the model" if body.source == "model" else f"the harness ({body.reason})"
                return entry("summary", f"context condensed by {by} up to turn {body.cut_after_turn}")
            case SessionCompleted():
                return entry("completed", body.reason)
            case SessionFailed():
                return entry("failed", body.cause or "its subject was erased")
            case TurnSampled():
                return self._turn(offset, time_ms, body, self._cannot_see)
            case ToolRequested():
                return Entry(
                    offset=offset, kind="call", time_ms=time_ms, name=body.name, arguments=body.arguments,
                    turn=body.turn, index=body.index,
                )  # fmt: skip
            case ToolCompleted():
                return Entry(
                    offset=offset, kind="result", time_ms=time_ms, text=body.text, turn=body.turn, index=body.index,
                    is_error=body.is_error, milliseconds=body.duration_ms,
                    diffs=[self._diff(change) for change in (body.delta.changes if body.delta is not None else [])],
                )  # fmt: skip
        return None

    def _turn(self, offset: int, time_ms: int, body: TurnSampled, cannot_see: bool) -> Entry:
        completion = read_i32(body.completion)
        logprobs = read_f32(body.logprobs)
        text = WITHHELD if cannot_see else ""
        if self._template is not None and not cannot_see:
            parsed = self._template.parse(completion)
            text = parsed.text.strip() + ("\n[done]" if parsed.done else "")
            text += "".join(f"\n[malformed call of {c.name or 'no tool'}: {c.error}]" for c in parsed.calls if c.error)
        ends = [*(span.start for span in body.spans), len(completion)]
        return Entry(
            offset=offset,
            kind="turn",
            time_ms=time_ms,
            text=text.strip(),
            turn=body.turn,
            milliseconds=body.queue_ms + body.prefill_ms + body.decode_ms,
            prompt_tokens=len(read_i32(body.prompt)),
            sampled_tokens=len(completion),
            mean_logprob=sum(logprobs) / len(logprobs) if logprobs and not cannot_see else None,
            versions=[(s.version, stop - start) for s, (start, stop) in zip(body.spans, pairwise(ends), strict=True)],
            finish_reason=body.finish_reason,
        )

    def _diff(self, change: FileChange) -> str:
        before = self._files.get(change.path)
        if change.kind == "delete":
            self._files.pop(change.path, None)
            return f"--- a/{change.path}\n+++ /dev/null\n(deleted, {len(before)} bytes)\n" if before else (
                f"deleted: {change.path}\n"
            )  # fmt: skip
        if change.ref is not None:
            return f"{change.path}: {change.ref.size} bytes, stored as {change.ref.key}\n"
        if change.kind != "file":
            return f"{change.path}: {change.kind} {change.content.decode('utf-8', 'replace')}".rstrip() + "\n"
        self._files[change.path] = change.content
        return unified(change.path, before, change.content) or f"{change.path}: mode {change.mode:o}\n"


# -- text ----------------------------------------------------------------------------------------------------------


def as_text(found: Transcript) -> str:
    """For a terminal or a pager."""
    lines = [
        f"session {found.session_id}   {found.origin}, policy {found.policy}"
        + (f", group {found.group_id}, attempt {found.attempt}" if found.group_id else ""),
        f"sessions.v1/{found.partition}@{found.first_offset}"
        + (f"   task {found.task}" if found.task else "")
        + (f"   subject {found.subject}" if found.subject else ""),
    ]
    for entry in found.entries:
        lines += _lines(entry)
    if found.ignored:
        lines.append(f"({found.ignored} records of former owners, or repeated ones, are not shown)")
    return "\n".join([*lines, "", *_verdict(found.verdict)])


def _lines(entry: Entry) -> list[str]:
    match entry.kind:
        case "message":
            return ["", "user:", *_indented(entry.text)]
        case "turn":
            return ["", _turn_head(entry), *_indented(entry.text)]
        case "call":
            arguments = ", ".join(f"{key}={_short(value)}" for key, value in entry.arguments.items())
            return [f"  → {entry.name}({arguments})"]
        case "result":
            mark = "✗" if entry.is_error else "✓"
            head = f"  {mark} {entry.turn}.{entry.index}, {entry.milliseconds:.0f} ms"
            diffs = [line for diff in entry.diffs for line in _indented(diff, "    ")]
            return [head, *_indented(entry.text, "    "), *diffs]
        case "opened":
            return []
        case _:
            stamp = time.strftime("%H:%M:%S", time.gmtime(entry.time_ms / 1000))
            return [f"· {stamp} {entry.kind}" + (f": {entry.text}" if entry.text else "")]


def _turn_head(entry: Entry) -> str:
    versions = ", ".join(f"{tokens} under version {version}" for version, tokens in entry.versions)
    likelihood = "" if entry.mean_logprob is None else f", mean log-prob {entry.mean_logprob:.2f}"
    return (
        f"turn {entry.turn}: {entry.prompt_tokens} tokens in, {entry.sampled_tokens} sampled ({versions}){likelihood}, "
        f"{entry.milliseconds:.0f} ms, {entry.finish_reason}"
    )


def _verdict(verdict: RewardAssigned | RewardUngraded | None) -> list[str]:
    match verdict:
        case None:
            return ["no verdict on the log"]
        case RewardUngraded():
            return [f"ungraded: {verdict.cause}"]
        case RewardAssigned():
            parts = ", ".join(f"{name} {value:g}" for name, value in verdict.components.items())
            tests = f"; tests passed {len(verdict.tests_passed)}, failed {len(verdict.tests_failed)}"
            return [f"reward {verdict.total:g} ({parts}) by {verdict.grader} {verdict.grader_version}{tests}"]


def _indented(text: str, margin: str = "  ") -> list[str]:
    lines = text.splitlines()
    shown = lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:
        shown.append(f"… {len(lines) - SHOWN_LINES} more lines (--json has all)")
    return textwrap.indent("\n".join(shown), margin).splitlines()


def _short(value: str, limit: int = 60) -> str:
    flat = value.replace("\n", "⏎")
    return repr(flat if len(flat) <= limit else flat[: limit - 1] + "…")
