"""What waits now, and for whom, from the log: for the metrics page and `odradek status`. Pure.

Each is of a kind in `waits.TABLE`, which names its owner and deadline. Ages are by the log's times, so one that its
owner began only later (a call that queued) shows older than it is, never younger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.sessions import SessionBook, SessionNote
from odradek.infra.observe.waits import ASSEMBLY, BY_NAME, CALL, GRADING, GROUP, LOADING, TRAINING, TURN, constant


class Pending(msgspec.Struct, frozen=True, kw_only=True):
    """Something that waits now."""

    wait: str
    """Its name in `waits.TABLE`."""
    owner: str
    who: str
    """What waits: a group, a session, a lane, a replica."""
    what: str
    age_s: float
    deadline_s: float | None = None
    """From the same start; None: nothing is owed."""

    @property
    def late(self) -> bool:
        return self.deadline_s is not None and self.age_s > self.deadline_s


def pending(fold: RunFold, book: SessionBook, now_ms: int) -> list[Pending]:
    """What waits at `now_ms`, the oldest first."""

    def made(name: str, who: str, what: str, since_ms: int, deadline_s: float | None) -> Pending:
        age = max(0.0, (now_ms - since_ms) / 1000)
        return Pending(wait=name, owner=BY_NAME[name].owner, who=who, what=what, age_s=age, deadline_s=deadline_s)

    found = [made(*row) for row in (*_groups(fold), *_sessions(fold, book), *_lanes(fold), *_replicas(fold))]
    return sorted(found, key=lambda one: -one.age_s)


_Row = tuple[str, str, str, int, float | None]


def _groups(fold: RunFold) -> Iterator[_Row]:
    for group_id in fold.open_groups:
        group, since = fold.groups[group_id], fold.opened_ms[group_id]
        yield GROUP, group_id, f"task {group.task_id}", since, max(0.0, (group.deadline_ms - since) / 1000)


def _sessions(fold: RunFold, book: SessionBook) -> Iterator[_Row]:
    graded = fold.verdicts.keys() | fold.ungraded_sessions
    for note in book.sessions.values():
        in_group = note.opened.group_id in fold.open_groups
        if not note.end and (in_group or note.origin == "production"):
            yield _step(book, note)
        elif note.end and in_group and note.session_id not in graded:
            yield GRADING, note.session_id, "its verdict", book.time(note, note.ended_at), BY_NAME[GRADING].seconds()


def _step(book: SessionBook, note: SessionNote) -> _Row:
    """What an unfinished session does now: its first call without a result, else its next turn."""
    call = next((call for call in note.calls if call.done_at < 0), None)
    if call is None:
        return TURN, note.session_id, f"turn {len(note.turns)}", book.time(note, note.last_at), BY_NAME[TURN].seconds()
    grace = constant("actors.session.clients.CALL_GRACE_S") or 0.0
    limit = note.opened.budget.tool_seconds + grace
    return CALL, note.session_id, f"{call.name}, turn {call.turn}", book.time(note, call.requested_at), limit


def _lanes(fold: RunFold) -> Iterator[_Row]:
    for lane, config in fold.lanes.items():
        waiting = fold.unbatched_since(lane)
        if waiting is not None:
            count = fold.unbatched(lane)
            yield (
                ASSEMBLY,
                lane,
                f"{count} sealed groups; a batch takes {config.groups_per_batch} kept ones",
                waiting,
                None,
            )
    trained = {step.batch_id for step in fold.steps}
    for batch_id, assembled in fold.batch_times.items():
        if batch_id not in trained:
            yield TRAINING, fold.batches[batch_id].lane, f"batch {fold.batches[batch_id].ordinal}", assembled, None


def _replicas(fold: RunFold) -> Iterator[_Row]:
    if fold.current is None or fold.current not in fold.published:
        return
    for replica, report in fold.replicas.items():
        if report.version != fold.current:
            since = fold.published[fold.current]
            yield LOADING, replica, f"version {fold.current}", since, BY_NAME[LOADING].seconds()


def as_json(waits: Sequence[Pending]) -> list[dict[str, Any]]:
    """For actors' answers and documents."""
    found: list[dict[str, Any]] = msgspec.to_builtins(waits)
    return found
