"""Every session as a short note, folded from sessions.v1: what it is, its turns and calls with their times, its end.

One fold for `session list`, `watch`, `report` and the traces of the dashboard. Only records that count by the rule of
one owner are noted (`streams.ownership`); the others are counted. Holds no tokens and no text. Pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from odradek.infra.observe.clock import LogClock, settle
from odradek.streams.codec import type_of
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionOpened,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
)
from odradek.streams.ownership import OwnerRule

INT32_BYTES = 4
RECENT_RECORDS = 1000
"""Newest records of a partition in which `SessionBook.recent` looks. Too few undercounts a busy partition's last
seconds; too many costs a live view time."""
KEPT_SESSIONS = 5000
"""Ended sessions that a reader without an end remembers: some 10 MB. Fewer than are ungraded at one time hides the
reward actor's lag."""
CALL = -1
FAILED = "failed"
"""`SessionNote.end` of a session that a fault of ours ended."""


@dataclass(slots=True)
class TurnNote:
    """One sampled turn. `at` indexes the partition's clock: when sampling had ended and was logged."""

    at: int
    turn: int
    prompt_tokens: int
    sampled_tokens: int
    versions: list[int]
    finish_reason: str
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    calls: int = 0


@dataclass(slots=True)
class CallNote:
    """One tool call, from the logged intent to the logged result (`done_at` -1 while there is none)."""

    requested_at: int
    turn: int
    index: int
    name: str
    effect: str
    done_at: int = -1
    is_error: bool = False
    duration_ms: float = 0.0


@dataclass(slots=True)
class SessionNote:
    """One session so far."""

    session_id: str
    partition: int
    opened: SessionOpened
    origin: Origin
    tenant: str
    subject: str
    """Whose session it is; empty for nobody's."""
    first_offset: int
    opened_at: int
    last_offset: int = -1
    last_at: int = -1
    ended_at: int = -1
    end: str = ""
    """Why it ended: an end reason, `failed`, or empty while it goes on."""
    cause: str = ""
    usage: Usage = field(default_factory=Usage)
    resumed: int = 0
    environments: int = 0
    turns: list[TurnNote] = field(default_factory=list)
    calls: list[CallNote] = field(default_factory=list)

    @property
    def versions(self) -> list[int]:
        """Weight versions that sampled any token of it, ascending."""
        return sorted({version for turn in self.turns for version in turn.versions})

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.sampled_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Activity:
    """What was logged in some stretch of time."""

    calls: int = 0
    turns: int = 0
    sampled_tokens: int = 0


@dataclass(slots=True)
class SessionBook:
    """See the module. `apply` takes records of sessions.v1, each partition in order."""

    sessions: dict[str, SessionNote] = field(default_factory=dict)
    """In the order in which their first records were read."""
    events: Counter[str] = field(default_factory=Counter)
    ignored: int = 0
    """Records that the rule of one owner sets aside: a former owner's, or repeated."""
    headless: int = 0
    """Records of sessions whose opening was not read (a reader that began in the middle)."""
    clocks: dict[int, LogClock] = field(default_factory=dict)
    finished_calls: int = 0
    opened: Counter[Origin] = field(default_factory=Counter)
    ended: Counter[tuple[Origin, str]] = field(default_factory=Counter)
    """By origin and end."""
    calls: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Finished calls by tool and whether the result was an error."""
    turns: int = 0
    sampled: Counter[int] = field(default_factory=Counter)
    """Sampled tokens by weight version; a turn under several counts for its newest."""
    _marks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By partition, in order: (clock index, sampled tokens) of each turn, (clock index, -1) of each finished call."""
    _rules: dict[str, OwnerRule] = field(default_factory=dict)

    def apply(
        self, ref: RecordRef, key: str, event_id: str, meta: Meta, body: SessionEvent, record_ms: int
    ) -> SessionNote | None:
        """Note one record; the session's note, or None if the record does not count."""
        clock = self.clocks.setdefault(ref.partition, LogClock(ref.topic, ref.partition))
        at = clock.add(ref.offset, record_ms)
        self.events[type_of(body)] += 1
        if key not in self._rules and not isinstance(body, SessionOpened):
            self.headless += 1
            return None
        if not self._rules.setdefault(key, OwnerRule()).accepts(ref.offset, event_id, meta, body):
            self.ignored += 1
            return None
        note = self.sessions.get(key)
        if note is None:
            if not isinstance(body, SessionOpened):
                return None
            opened = msgspec.structs.replace(body, files={})
            note = self.sessions[key] = SessionNote(
                key,
                ref.partition,
                opened,
                meta.origin,
                meta.tenant,
                meta.subject,
                first_offset=ref.offset,
                opened_at=at,
            )
            self.opened[meta.origin] += 1
        note.last_offset, note.last_at = ref.offset, at
        self._note(note, at, body)
        return note

    def _note(self, note: SessionNote, at: int, body: SessionEvent) -> None:
        match body:
            case SessionResumed():
                note.resumed += 1
            case EnvironmentOpened():
                note.environments += 1
            case TurnSampled():
                note.turns.append(_turn(at, body))
                self._marks.setdefault(note.partition, []).append((at, note.turns[-1].sampled_tokens))
                self.turns += 1
                self.sampled[max(note.turns[-1].versions, default=-1)] += note.turns[-1].sampled_tokens
            case ToolRequested():
                note.calls.append(CallNote(at, body.turn, body.index, body.name, body.effect))
                for turn in note.turns[-1:]:
                    turn.calls += 1
            case ToolCompleted():
                self._done(note, at, body)
            case SessionCompleted():
                note.end, note.usage, note.ended_at = body.reason, body.usage, at
                self.ended[note.origin, note.end] += 1
            case SessionFailed():
                note.end, note.cause, note.ended_at = FAILED, body.cause, at
                self.ended[note.origin, note.end] += 1
            case _:
                pass

    def _done(self, note: SessionNote, at: int, body: ToolCompleted) -> None:
        for call in reversed(note.calls):
            if (call.turn, call.index) == (body.turn, body.index):
                call.done_at, call.is_error, call.duration_ms = at, body.is_error, body.duration_ms
                self.finished_calls += 1
                self.calls[call.name, body.is_error] += 1
                self._marks.setdefault(note.partition, []).append((at, CALL))
                return

    def prune(self, keep: int = KEPT_SESSIONS) -> int:
        """Forget the oldest ended sessions beyond `keep`, for a reader that never ends; the counters stay. Later
        records of a forgotten session are `headless`. Returns how many were forgotten."""
        ended = [session for session, note in self.sessions.items() if note.end]
        forgotten = ended[: max(0, len(ended) - keep)]
        for session in forgotten:
            del self.sessions[session], self._rules[session]
        for marks in self._marks.values():
            del marks[: max(0, len(marks) - RECENT_RECORDS)]
        return len(forgotten)

    def time(self, note: SessionNote, at: int) -> int:
        """When a record of this session happened, milliseconds since 1970."""
        return self.clocks[note.partition].time(at)

    def recent(self, since_ms: int) -> Activity:
        """Calls finished and turns sampled since then, by the log's time."""
        calls = turns = tokens = 0
        for partition, marks in self._marks.items():
            clock = self.clocks[partition]
            start = max(0, len(clock.stamps) - RECENT_RECORDS)
            times = settle(clock.stamps[start:], reader_ms=clock.reader_ms)[0]
            for at, amount in reversed(marks):
                if at < start:
                    break
                if times[at - start] >= since_ms:
                    calls += amount == CALL
                    turns += amount != CALL
                    tokens += max(0, amount)
        return Activity(calls, turns, tokens)

    @property
    def unfinished(self) -> list[SessionNote]:
        """Sessions without an end on the log."""
        return [note for note in self.sessions.values() if not note.end]


def _turn(at: int, body: TurnSampled) -> TurnNote:
    return TurnNote(
        at=at,
        turn=body.turn,
        prompt_tokens=len(body.prompt) // INT32_BYTES,
        sampled_tokens=len(body.completion) // INT32_BYTES,
        versions=sorted({span.version for span in body.spans}),
        finish_reason=body.finish_reason,
        queue_ms=body.queue_ms,
        prefill_ms=body.prefill_ms,
        decode_ms=body.decode_ms,
    )
