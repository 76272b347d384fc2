"""Sessions whose group is closed before they ended: each still ends, with a reason, on the log. Pure.

A seal at the deadline or a discard leaves members without a verdict. Those that run are told to stop. Those whose host
is down then run nowhere, and no placement of an open group brings them back: so each stays here until its verdict is
on the log (every session that ends gets one), and its host, once it answers, is handed it to be ended.

It is a fold of groups.v1 and rewards.v1 like everything of the controller's: a successor goes on with it
(test_sessions_of_closed_groups.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from odradek.actors.controller.groups import GroupState
from odradek.streams.events.groups import GroupDiscarded, GroupSealed

REMEMBERED_MS = 7 * 24 * 3600 * 1000
"""Milliseconds after its group was closed for which a session is ended by the controller. Too low: one whose host and
controller were down for longer never ends; too high: a restart reads that much more of rewards.v1."""


@dataclass(frozen=True, slots=True)
class Unended:
    """A session to be ended."""

    session_id: str
    group: GroupState
    attempt: int
    closed_ms: int


@dataclass(slots=True)
class Endings:
    """See the module. Idempotent."""

    unended: dict[str, Unended] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Unended]:
        return iter(self.unended.values())

    def __contains__(self, session: str) -> bool:
        return session in self.unended

    def closed(self, group: GroupState, event: GroupSealed | GroupDiscarded, now_ms: int) -> None:
        """The group was closed; whoever of it has no verdict is still to end."""
        if isinstance(event, GroupSealed):
            left = {member.session_id for member in event.members if member.status == "missing"}
        else:
            left = set(event.unfinished)
        for attempt, member in enumerate(group.members):
            if member in left:
                self.unended[member] = Unended(member, group, attempt, now_ms)

    def ended(self, session: str) -> None:
        """Its verdict is on the log."""
        self.unended.pop(session, None)

    def forget(self, now_ms: int) -> None:
        """Drop those that nobody brought to an end in all that time."""
        self.unended = {name: one for name, one in self.unended.items() if now_ms - one.closed_ms < REMEMBERED_MS}
