"""What each table's rows are and how one event changes a row. Pure.

A row's key is (source partition, key) and its stored value contains the last applied offset; an event at or below it is
ignored. So the tables come out the same however often a worker repeats events after a crash, and rows of one key in two
partitions never overwrite each other: views merge them at read.
"""

import logging
from collections.abc import MutableMapping
from typing import Any, Generic, TypeVar

import msgspec

from odradek.streams import topics
from odradek.streams.envelope import Event, Record
from odradek.streams.errors import DecodeError
from odradek.streams.events import groups, rewards, sessions
from odradek.streams.topics import Topic

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)
Rows = MutableMapping[bytes, bytes]
"""A table: row key to encoded `Stored` row. A dict in the plain fold, a Faust table in the worker."""

MINUTE_MS = 60_000

STANDS_STILL = 4
"""Exit code of a worker that met a type its build does not know: started again, it would meet it again."""
FAULT_SUFFIX = ".fault"
"""Beside the snapshot: what such a worker says last."""


class Stored(msgspec.Struct, Generic[R]):
    """A row as kept."""

    offset: int
    """Last applied offset of the row's partition."""
    row: R


class Table(Generic[R]):
    """One projection: a source topic, the key of an event's row and the change it makes."""

    name: str
    topic: Topic
    row_type: type[R]

    def key(self, event: Event[Any]) -> str | None:
        """The row that an event belongs to; None for events that this table does not look at."""
        raise NotImplementedError

    def apply(self, row: R | None, event: Event[Any]) -> R:
        """The row after the event. Never changes its argument."""
        raise NotImplementedError

    def step(self, rows: Rows, record: Record) -> None:
        """Folds one record into the table. A record that nobody can decode changes no row; one of a type that this
        build does not know raises."""
        try:
            event = record.event
        except DecodeError as error:
            logger.warning("table %s passes over a record: %s", self.name, error)
            return
        key = self.key(event)
        if key is None:
            return
        place = f"{record.ref.partition}/{key}".encode()
        raw = rows.get(place)
        stored = None if raw is None else self.read(raw)
        if stored is not None and record.ref.offset <= stored.offset:
            return
        row = self.apply(None if stored is None else stored.row, event)
        rows[place] = msgspec.msgpack.encode(Stored(offset=record.ref.offset, row=row))

    def read(self, raw: bytes) -> Stored[R]:
        """A stored row."""
        return msgspec.msgpack.decode(raw, type=Stored[self.row_type])  # type: ignore[name-defined]

    def rows(self, rows: Rows) -> list[tuple[str, R]]:
        """(key, row) of every partition, in the order of their names."""
        return [(place.decode().partition("/")[2], self.read(rows[place]).row) for place in sorted(rows)]


class GroupRow(msgspec.Struct, frozen=True):
    """One group of rollouts."""

    lane: str
    task_id: str = ""
    purpose: str = ""
    labels: dict[str, str] = {}
    members: int = 0
    replaced: int = 0
    status: str = "open"
    """open, sealed or discarded."""
    reason: str = ""
    dropped_tokens: list[int] = []
    """Sampled tokens of the finished members of a discarded group."""


class GroupsTable(Table[GroupRow]):
    """groups.v1 by group."""

    name = "groups"
    topic = topics.GROUPS
    row_type = GroupRow

    def key(self, event: Event[Any]) -> str | None:
        """See `Table`."""
        return getattr(event.body, "group_id", None)

    def apply(self, row: GroupRow | None, event: Event[Any]) -> GroupRow:
        """See `Table`. A group ends once: the first seal or discard stands."""
        row = row or GroupRow(lane=event.body.lane)
        match event.body:
            case groups.GroupOpened() as body:
                return msgspec.structs.replace(
                    row,
                    task_id=body.task_id,
                    purpose=body.purpose,
                    labels=body.labels,
                    members=len(body.sessions),
                )
            case groups.MemberReplaced():
                return msgspec.structs.replace(row, replaced=row.replaced + 1)
            case groups.GroupSealed(reason=reason) if row.status == "open":
                return msgspec.structs.replace(row, status="sealed", reason=reason)
            case groups.GroupDiscarded(reason=reason, member_tokens=tokens) if row.status == "open":
                return msgspec.structs.replace(row, status="discarded", reason=reason, dropped_tokens=tokens)
        return row


class RewardRow(msgspec.Struct, frozen=True):
    """What the graders said of one session."""

    group_id: str
    graded: bool = False
    version: int = 0
    """Newest weight version that sampled in the session."""
    total: float = 0.0
    components: dict[str, float] = {}
    sampled_tokens: int = 0
    turns: int = 0
    parallel_turns: int = 0
    reads_before_edit: bool | None = None
    ungraded: list[str] = []
    """Causes, one for each attempt to grade that failed."""
    revisions: int = 0


class RewardsTable(Table[RewardRow]):
    """rewards.v1 by session. The first assigned reward stands, as it does for training."""

    name = "rewards"
    topic = topics.REWARDS
    row_type = RewardRow

    def key(self, event: Event[Any]) -> str | None:
        """See `Table`."""
        return getattr(event.body, "session_id", None)

    def apply(self, row: RewardRow | None, event: Event[Any]) -> RewardRow:
        """See `Table`."""
        row = row or RewardRow(group_id=event.body.group_id)
        match event.body:
            case rewards.RewardAssigned() as body if not row.graded:
                return msgspec.structs.replace(
                    row,
                    graded=True,
                    version=body.newest_version,
                    total=body.total,
                    components=body.components,
                    sampled_tokens=body.sampled_tokens,
                    turns=body.turns,
                    parallel_turns=body.parallel_turns,
                    reads_before_edit=body.reads_before_edit,
                )
            case rewards.RewardUngraded(cause=cause):
                return msgspec.structs.replace(row, ungraded=[*row.ungraded, cause])
            case rewards.RewardRevised():
                return msgspec.structs.replace(row, revisions=row.revisions + 1)
        return row


class CurriculumRow(msgspec.Struct, frozen=True):
    """Solved or not, by session, for one group; the view joins groups to tasks."""

    solved: dict[str, float] = {}


class CurriculumTable(Table[CurriculumRow]):
    """rewards.v1 by group: what the controller's curriculum asks for."""

    name = "curriculum"
    topic = topics.REWARDS
    row_type = CurriculumRow

    def key(self, event: Event[Any]) -> str | None:
        """See `Table`."""
        return event.body.group_id if isinstance(event.body, rewards.RewardAssigned) else None

    def apply(self, row: CurriculumRow | None, event: Event[Any]) -> CurriculumRow:
        """See `Table`. A session graded twice counts once."""
        known = {} if row is None else row.solved
        return CurriculumRow(solved={event.body.session_id: event.body.components.get("solved", 0.0)} | known)


class UtilisationRow(msgspec.Struct, frozen=True):
    """What was done in one minute of event time, repeated work included: it used the machine too."""

    opened: int = 0
    ended: int = 0
    failed: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    tool_ms: float = 0.0


INT32_BYTES = 4


class UtilisationTable(Table[UtilisationRow]):
    """sessions.v1 by minute."""

    name = "utilisation"
    topic = topics.SESSIONS
    row_type = UtilisationRow

    def key(self, event: Event[Any]) -> str | None:
        """See `Table`."""
        return str(event.meta.time_ms // MINUTE_MS)

    def apply(self, row: UtilisationRow | None, event: Event[Any]) -> UtilisationRow:
        """See `Table`."""
        row = row or UtilisationRow()
        replace = msgspec.structs.replace
        match event.body:
            case sessions.SessionOpened():
                return replace(row, opened=row.opened + 1)
            case sessions.SessionCompleted():
                return replace(row, ended=row.ended + 1)
            case sessions.SessionFailed():
                return replace(row, failed=row.failed + 1)
            case sessions.TurnSampled() as body:
                return replace(
                    row,
                    turns=row.turns + 1,
                    sampled_tokens=row.sampled_tokens + len(body.completion) // INT32_BYTES,
                    prompt_tokens=row.prompt_tokens + len(body.prompt) // INT32_BYTES,
                    queue_ms=row.queue_ms + body.queue_ms,
                    prefill_ms=row.prefill_ms + body.prefill_ms,
                    decode_ms=row.decode_ms + body.decode_ms,
                )
            case sessions.ToolCompleted() as body:
                return replace(
                    row,
                    tool_calls=row.tool_calls + 1,
                    tool_errors=row.tool_errors + body.is_error,
                    tool_ms=row.tool_ms + body.duration_ms,
                )
        return row


GROUPS = GroupsTable()
REWARDS = RewardsTable()
CURRICULUM = CurriculumTable()
UTILISATION = UtilisationTable()
TABLES: tuple[Table[Any], ...] = (GROUPS, REWARDS, CURRICULUM, UTILISATION)
