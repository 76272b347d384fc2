"""What a run left behind, as the checks of the guarantees see it: log, acknowledgements, answers, host. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import SessionCompleted, SessionFailed
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.ownership import accepted
from support.crash.stored import leaf


class Seen(NamedTuple):
    """One decoded record."""

    ref: RecordRef
    key: str
    id: str
    meta: Meta
    body: Any


class Answer(NamedTuple):
    """What somebody said, beside what the log says of the same."""

    who: str
    what: str
    said: Any
    folded: Any


@dataclass
class World:
    """What a run left behind. `settled` is false where the run did not come to rest: then what is unfinished is not
    reported again thing by thing, because `waits` says what stood still."""

    log: Mapping[str, Sequence[Seen]]
    """By topic, each partition in offset order."""
    acknowledged: Sequence[tuple[RecordRef, str]] = ()
    """Coordinates and event id of everything a client was told is durable."""
    rebuilt: Mapping[str, bool] = field(default_factory=dict)
    """By batch id whether replay made it again byte for byte; a batch that is missing here was not rebuilt."""
    answers: Sequence[Answer] = ()
    left: Sequence[str] = ()
    """Processes, mounts, control groups and sandboxes found after the end."""
    altered: Sequence[str] = ()
    """What `audit verify` found, or why it could say nothing."""
    leaves: Mapping[tuple[str, int], Mapping[int, bytes]] = field(default_factory=dict)
    """By topic and partition, by offset the hash of each record as it is stored."""
    words: Mapping[str, bytes] = field(default_factory=dict)
    """By subject something that only they said, as their client knows it."""
    waits: Sequence[str] = ()
    """Waits that ran out of their deadline."""
    settled: bool = True

    def bodies(self, topic: str, *kinds: type) -> list[tuple[Seen, Any]]:
        """The records of a topic with these bodies."""
        return [(seen, seen.body) for seen in self.log.get(topic, ()) if isinstance(seen.body, kinds)]

    @cached_property
    def sessions(self) -> dict[str, list[Seen]]:
        """All records of each session, in log order."""
        found: dict[str, list[Seen]] = defaultdict(list)
        for seen in self.log.get("sessions.v1", ()):
            found[seen.key].append(seen)
        return dict(found)

    @cached_property
    def accepted(self) -> dict[str, list[Seen]]:
        """The records of each session that count."""
        result = {}
        for session, records in self.sessions.items():
            by_offset = {seen.ref.offset: seen for seen in records}
            rows = [(seen.ref.offset, seen.id, seen.meta, seen.body) for seen in records]
            result[session] = [by_offset[offset] for offset, *_ in accepted(rows)]
        return result

    @cached_property
    def ends(self) -> dict[str, Seen]:
        """The record that ended each session."""
        return {
            session: seen
            for session, records in self.accepted.items()
            for seen in records
            if isinstance(seen.body, SessionCompleted | SessionFailed)
        }

    @cached_property
    def verdicts(self) -> dict[str, Seen]:
        """The first verdict of each session."""
        found: dict[str, Seen] = {}
        for seen, body in self.bodies("rewards.v1", RewardAssigned, RewardUngraded):
            found.setdefault(body.session_id, seen)
        return found

    @cached_property
    def tasks(self) -> dict[RecordRef, TaskPublished]:
        return {seen.ref: body for seen, body in self.bodies("tasks.v1", TaskPublished)}

    def at(self, topic: str, partition: int, offset: int) -> Seen | None:
        """The record at these coordinates."""
        return self._places.get(RecordRef(topic, partition, offset))

    @cached_property
    def _places(self) -> dict[RecordRef, Seen]:
        return {seen.ref: seen for records in self.log.values() for seen in records}

    def lane_of(self, lane: str, topic: str, *kinds: type) -> list[tuple[Seen, Any]]:
        """One lane's records of these kinds."""
        return [(seen, body) for seen, body in self.bodies(topic, *kinds) if body.lane == lane]


def world_of(records: Iterable[Record], **more: Any) -> World:
    """A `World` of these records, in any order. What nobody can decode is nobody's event and is left out."""
    log: dict[str, list[Seen]] = defaultdict(list)
    leaves: dict[tuple[str, int], dict[int, bytes]] = defaultdict(dict)
    for record in sorted(records, key=lambda record: record.ref):
        leaves[record.ref.topic, record.ref.partition][record.ref.offset] = leaf(record)
        try:
            event = record.event
        except UndecodableRecord:
            continue
        log[record.ref.topic].append(Seen(record.ref, record.key or "", event.id, event.meta, event.body))
    return World(dict(log), leaves=dict(leaves), **more)
