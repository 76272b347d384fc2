"""What became of each published task, from the task topics and groups.v1. Pure.

A task record leads to one group or to one refusal, each with its reason on groups.v1; a second record of a key with the
same content leads to nothing of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from odradek.streams.events.groups import GroupDiscarded, GroupEvent, GroupOpened, GroupSealed
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskPublished

State = Literal["waiting", "repeated", "open", "sealed", "discarded", "refused"]
UNWANTED: tuple[State, ...] = ("discarded", "refused")
"""No group of theirs is trained on."""


class TaskRow(msgspec.Struct, frozen=True):
    """One published task."""

    task_id: str
    at: RecordRef
    purpose: str
    state: State
    """waiting: no group yet. repeated: another record of the key is the task. open, sealed: so is its group.
    discarded: it had a group, which was given up. refused: it had none, and gets none."""
    reason: str = ""
    """Why the group was sealed or discarded, or the task refused."""
    detail: str = ""
    group_id: str = ""


@dataclass(slots=True)
class Decisions:
    """The fold of groups.v1: by task record its group, by lane and group its end. The first of each stands: the
    controller of a branch refuses what is not for its policy, under the id that the group has in the main lane."""

    opened: dict[RecordRef, tuple[str, str]] = field(default_factory=dict)
    ends: dict[tuple[str, str], GroupSealed | GroupDiscarded] = field(default_factory=dict)
    refused: dict[RecordRef, GroupDiscarded] = field(default_factory=dict)

    def apply(self, body: GroupEvent) -> None:
        """Fold one record."""
        match body:
            case GroupOpened():
                self.opened.setdefault(body.task, (body.lane, body.group_id))
            case GroupSealed() | GroupDiscarded():
                self.ends.setdefault((body.lane, body.group_id), body)
                if isinstance(body, GroupDiscarded) and body.task is not None:
                    self.refused.setdefault(body.task, body)
            case _:
                pass


def task_rows(tasks: Iterable[tuple[RecordRef, TaskPublished]], decisions: Decisions) -> list[TaskRow]:
    """Every task, in the order given."""
    first: dict[tuple[str, str], RecordRef] = {}
    rows = []
    for ref, task in tasks:
        row = _row(ref, task, decisions)
        if row.state != "refused":
            at = first.setdefault((ref.topic, task.idempotency_key or task.task_id), ref)
            if row.state == "waiting" and at != ref:
                row = msgspec.structs.replace(row, state="repeated", detail=f"the task at {at} again")
        rows.append(row)
    return rows


def _row(ref: RecordRef, task: TaskPublished, decisions: Decisions) -> TaskRow:
    place = decisions.opened.get(ref)
    row = TaskRow(task.task_id, ref, task.purpose, "waiting", group_id="" if place is None else place[1])
    if place is None:
        refused = decisions.refused.get(ref)
        return row if refused is None else _with(row, "refused", refused.reason, refused.detail)
    match decisions.ends.get(place):
        case GroupSealed(reason=reason):
            return _with(row, "sealed", reason, "")
        case GroupDiscarded(reason=reason, detail=detail):
            return _with(row, "discarded", reason, detail)
        case _:
            return _with(row, "open", "", "")


def _with(row: TaskRow, state: State, reason: str, detail: str) -> TaskRow:
    return msgspec.structs.replace(row, state=state, reason=reason, detail=detail)


def task_text(row: TaskRow) -> str:
    """One line."""
    why = ": ".join(part for part in (row.reason, row.detail) if part)
    return f"{row.task_id}  {row.at}  {row.purpose}  {row.state}" + (f": {why}" if why else "")
