"""The rule of one group, one end: which records of groups.v1 count. Shared by controller, assembly, replay and views.

A lane's groups are a fold of its records, in log order:
- the first group.opened of a group counts, if it names each member once;
- a member is replaced only while its group is open and only if it is a member;
- a seal counts once, while its group is open, and only if it names exactly the members, in their order;
- the first end (seal or discard) is the only one; a task may be discarded without ever having been opened.

Everything else is counted in `ignored` and changes nothing: a second seal, a seal of a group that nobody opened, a
seal of other members, a zombie's. So a group is batched at most once in a lane, whatever lies on groups.v1. Pure; the
state at an offset is a function of the records before it, so that a restarted holder and a replay have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from odradek.streams.events.groups import (
    GroupDiscarded,
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    MemberReplaced,
)

_Group = tuple[str, str]
"""Lane and group: lanes share a partition, and an id of one says nothing about another."""


@dataclass(slots=True)
class GroupRule:
    """Folds the records of any number of lanes, each in log order, into accepted or ignored."""

    ignored: int = 0
    open: dict[_Group, list[str]] = field(default_factory=dict)
    """The members of each open group."""
    ended: set[_Group] = field(default_factory=set)

    def accepts(self, event: GroupEvent) -> bool:
        """Whether this record counts; updates the rule's state."""
        ok = self._accepts(event)
        if not ok:
            self.ignored += 1
        return ok

    def _accepts(self, event: GroupEvent) -> bool:
        if isinstance(event, LaneConfigured):
            return True
        group = (event.lane, event.group_id)
        members = self.open.get(group)
        match event:
            case GroupOpened():
                if members is not None or group in self.ended or len(set(event.sessions)) != len(event.sessions):
                    return False
                self.open[group] = list(event.sessions)
                return True
            case MemberReplaced():
                if members is None or event.lost_session not in members or event.new_session in members:
                    return False
                members[members.index(event.lost_session)] = event.new_session
                return True
            case GroupSealed():
                if members is None or [member.session_id for member in event.members] != members:
                    return False
            case GroupDiscarded():
                if group in self.ended:
                    return False
        self.open.pop(group, None)
        self.ended.add(group)
        return True
