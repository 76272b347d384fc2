"""The rule of one owner: which records of a session count (DESIGN §5). Shared by the actor, assembly and replay.

- A session.opened or session.resumed record starts an epoch numbered by its own offset; the highest is current.
- An owner event counts only with the current epoch and the next sequence number.
- An input (message, cancel) carries neither and counts always.
- The first record of an event id wins. After the end only environment.closed counts.

Everything else is counted in `ignored` and changes nothing: a zombie owner is harmless by rule. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from odradek.streams.events.meta import NO_SEQUENCE, Meta
from odradek.streams.events.sessions import (
    CancelRequested,
    EnvironmentClosed,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionOpened,
    SessionResumed,
)

SessionRecord = tuple[int, str, Meta, SessionEvent]
"""(offset, event id, meta, body) of one record of one session."""


class OwnerRule:
    """Folds one session's records, in log order, into accepted or ignored."""

    def __init__(self) -> None:
        self.epoch = NO_SEQUENCE
        self.next_seq = 0
        self.ignored = 0
        self.ended = False
        self._seen: set[str] = set()

    def has_seen(self, event_id: str) -> bool:
        """Whether a record of that id counts already."""
        return event_id in self._seen

    def accepts(self, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> bool:
        """Whether this record counts; updates the rule's state."""
        ok = self._accepts(offset, event_id, meta, body)
        if not ok:
            self.ignored += 1
        return ok

    def _accepts(self, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> bool:
        if isinstance(body, SessionOpened | SessionResumed):
            if offset <= self.epoch:
                return False
            self.epoch, self.next_seq = offset, 0
            return True
        if event_id in self._seen:
            return False
        if isinstance(body, MessageReceived | CancelRequested):
            self._seen.add(event_id)
            return True
        if self.ended and not isinstance(body, EnvironmentClosed):
            return False
        if meta.epoch != self.epoch or meta.seq != self.next_seq:
            return False
        self._seen.add(event_id)
        self.next_seq += 1
        self.ended = self.ended or isinstance(body, SessionCompleted | SessionFailed)
        return True


def accepted(records: Iterable[SessionRecord]) -> Iterator[SessionRecord]:
    """The records of one session that count, in order."""
    rule = OwnerRule()
    for record in records:
        if rule.accepts(*record):
            yield record
