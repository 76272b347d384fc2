"""What the session's conduct says beside the tests: turns, failed calls, reads before edits. Pure.

All from accepted records only, so that a zombie's events count for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from odradek.streams.codec import read_i32
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    SessionCompleted,
    SessionFailed,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    WorkspaceDelta,
)
from odradek.streams.ownership import SessionRecord, accepted

EDITS = frozenset({"edit_file", "write_file"})


@dataclass(slots=True)
class Conduct:
    """A finished session as graders see it."""

    meta: Meta = field(default_factory=Meta)
    opened: SessionOpened | None = None
    end: SessionCompleted | SessionFailed | None = None
    first_offset: int = -1
    last_offset: int = -1
    """Of the record that ended the session."""
    turns: int = 0
    calls: int = 0
    errors: int = 0
    parallel_turns: int = 0
    sampled_tokens: int = 0
    versions: list[int] = field(default_factory=list)
    deltas: list[WorkspaceDelta] = field(default_factory=list)
    reads_before_edit: bool | None = None
    """Whether some file was read before the first edit; None when nothing was edited."""


def conduct_of(records: Iterable[SessionRecord]) -> Conduct:
    """Fold the records of one session, in log order."""
    conduct = Conduct()
    calls_of_turn: dict[int, int] = {}
    has_read = False
    for offset, _, meta, body in accepted(records):
        match body:
            case SessionOpened():
                conduct.opened, conduct.meta, conduct.first_offset = body, meta, offset
            case TurnSampled():
                conduct.turns += body.purpose == "act"
                if body.copied_from is None:
                    conduct.sampled_tokens += len(read_i32(body.completion))
                    conduct.versions += [span.version for span in body.spans]
            case ToolRequested():
                conduct.calls += 1
                calls_of_turn[body.turn] = calls_of_turn.get(body.turn, 0) + 1
                if body.name in EDITS and conduct.reads_before_edit is None:
                    conduct.reads_before_edit = has_read
                has_read = has_read or body.name == "read_file"
            case ToolCompleted():
                conduct.errors += body.is_error
                if body.delta is not None and body.delta.changes:
                    conduct.deltas.append(body.delta)
            case SessionCompleted() | SessionFailed():
                conduct.end, conduct.last_offset = body, offset
            case _:
                pass
    conduct.parallel_turns = sum(1 for count in calls_of_turn.values() if count > 1)
    return conduct
