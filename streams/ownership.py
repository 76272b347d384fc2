"""The rule of one owner: which records of a session count (DESIGN §5). Shared by the actor, assembly and replay.

- A session.opened or session.resumed record starts an epoch numbered by its own offset; the highest is current.
- An owner event counts only with the current epoch and the next sequence number.
- An input (message, cancel) carries neither and counts always.
- The first record of an event id wins; a takeover that was written twice (its first append was not acknowledged) is one
  epoch under either of its offsets. After the end only environment.closed counts.

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
        self._taken_over: str = ""
        self._offsets: set[int] = set()
        """Of the records that began the current epoch: one, unless it was written again."""

    def holds(self, offset: int) -> bool:
        """Whether the takeover at this offset is the current owner's."""
        return offset in self._offsets

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
            return self._takes_over(offset, event_id)
        if event_id in self._seen:
            return False
        if isinstance(body, MessageReceived | CancelRequested):
            self._seen.add(event_id)
            return True
        if self.ended and not isinstance(body, EnvironmentClosed):
            return False
        if meta.epoch not in self._offsets or meta.seq != self.next_seq:
            return False
        self._seen.add(event_id)
        self.next_seq += 1
        self.ended = self.ended or isinstance(body, SessionCompleted | SessionFailed)
        return True

    def _takes_over(self, offset: int, event_id: str) -> bool:
        if offset <= self.epoch:
            return False
        if event_id == self._taken_over:
            self._offsets.add(offset)
        if event_id in self._seen:
            return False
        self._seen.add(event_id)
        self._taken_over, self._offsets = event_id, {offset}
        self.epoch, self.next_seq = offset, 0
        return True


def accepted(records: Iterable[SessionRecord]) -> Iterator[SessionRecord]:
    """The records of one session that count, in order."""
    rule = OwnerRule()
    for record in records:
        if rule.accepts(*record):
            yield record
