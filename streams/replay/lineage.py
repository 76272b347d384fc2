"""From a weight version back to what it was trained on: version, step, batch, groups, sessions, tasks, single events.

From the log alone. One step back; the parent's own lineage is asked for by its number. `sightings` walks the other way.
Also the fold of weights.v1 that people are shown.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from odradek.streams import topics
from odradek.streams.assembly.reader import Extent, read_sessions
from odradek.streams.errors import DecodeError, Terminal
from odradek.streams.events.batches import BatchAssembled, BatchMember, DroppedGroup, StepCompleted
from odradek.streams.events.groups import GroupOpened
from odradek.streams.events.weights import (
    CurrentWeights,
    ReplicaReported,
    VersionPinned,
    VersionPruned,
    VersionPublished,
    VersionRolledBack,
)
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord, accepted
from odradek.streams.pruning import taken
from odradek.streams.replay.select import bodies, readable


@dataclass(slots=True)
class Versions:
    """One policy's versions and how they are served, in the order of weights.v1."""

    policy: str
    published: dict[int, VersionPublished] = field(default_factory=dict)
    published_ms: dict[int, int] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)
    """Of `published`: their weights are not kept any more."""
    pinned: int | None = None
    rolled_back_to: int | None = None
    """Until a newer version is published."""
    current: int | None = None
    """What the controller says to serve; its fold, not ours."""
    replicas: dict[str, ReplicaReported] = field(default_factory=dict)
    """The last report of each."""

    def apply(self, body: Any, time_ms: int) -> None:
        """Fold one record of weights.v1, weights.current.v1 or replicas.v1."""
        if getattr(body, "policy", None) != self.policy:
            return
        match body:
            case VersionPublished():
                if body.restored:
                    self._give_up_above(body.version)
                self.published[body.version], self.published_ms[body.version] = body, time_ms
                self.pruned.discard(body.version)
                if self.rolled_back_to is not None and body.version > self.rolled_back_to:
                    self.rolled_back_to = None
            case VersionPinned() if body.version not in self.pruned:
                self.pinned = body.version
            case VersionRolledBack() if body.to_version not in self.pruned:
                self.rolled_back_to = body.to_version
            case VersionPruned():
                self.pruned |= taken(body, self.published, self.pinned, self.rolled_back_to)
            case CurrentWeights():
                self.current = body.version
            case ReplicaReported():
                self.replicas[body.replica] = body
            case _:
                pass

    def _give_up_above(self, version: int) -> None:
        """A new incarnation began at `version`: what an earlier one had above it is no version of this history."""
        for given_up in [number for number in self.published if number > version]:
            del self.published[given_up], self.published_ms[given_up]
            self.pruned.discard(given_up)
        self.pinned = self.pinned if self.pinned in self.published else None
        self.rolled_back_to = self.rolled_back_to if self.rolled_back_to in self.published else None


async def versions_of(event_log: EventLog, policy: str) -> Versions:
    """The fold of everything that is on the log now."""
    versions = Versions(policy)
    for topic in (topics.WEIGHTS.name, topics.WEIGHTS_CURRENT.name, topics.REPLICAS.name):
        async for record in event_log.read(topic, 0, await event_log.beginning(topic, 0)):
            try:
                versions.apply(record.event.body, record.timestamp_ms)
            except DecodeError:
                continue
    return versions


async def eras(event_log: EventLog, policy: str) -> list[dict[int, VersionPublished]]:
    """What each version number stood for, newest first: in the history that stands, and in each that a restore cut
    off. Numbers that were given up are used again."""
    versions, found = Versions(policy), list[dict[int, VersionPublished]]()
    async for body in bodies(event_log, topics.WEIGHTS.name):
        if isinstance(body, VersionPublished) and body.restored and body.policy == policy:
            found.append(dict(versions.published))
        versions.apply(body, 0)
    return [versions.published, *reversed(found)]


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of the batch: a task and its members."""

    group_id: str
    task_id: str
    task: str
    """Coordinates of the task's record."""
    labels: dict[str, str]
    members: list[BatchMember]


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """What turned the parent into this version."""

    policy: str
    version: int
    parent: int | None
    manifest_key: str
    batch_id: str
    """Empty for a version that no batch made (the warm start, a branch's first)."""
    parent_key: str = ""
    """The parent's manifest, where it is not the version before in the same place (a branch, a restore)."""
    batch_ordinal: int = -1
    assembler_version: int = 0
    metrics: dict[str, float] = {}
    """The step's."""
    left_out: list[str] = []
    """Members whose consent was gone at the step: zero weight."""
    groups: list[TrainedGroup] = []
    subjects: list[str] = []
    """Whose production sessions are among the members."""


class BatchLineage(msgspec.Struct, frozen=True, kw_only=True):
    """One batch between what it was made of and what it made."""

    batch_id: str
    lane: str
    policy: str
    ordinal: int
    at: str
    """Coordinates of batch.assembled."""
    assembler_version: int
    config_offset: int
    input_offset: int
    subjects_offset: int
    merkle_root: str
    version: int | None
    """The version that its step made; none while it is not trained."""
    manifest_key: str
    metrics: dict[str, float]
    left_out: list[str]
    groups: list[TrainedGroup]
    dropped: list[DroppedGroup]
    subjects: list[str]


async def lineage(event_log: EventLog, policy: str, version: int) -> Lineage:
    """Raises Terminal if the version, or the batch that it names, is not on the log."""
    versions = await versions_of(event_log, policy)
    if version not in versions.published:
        known = ", ".join(map(str, sorted(versions.published))) or "none"
        raise Terminal(f"policy {policy} has no version {version} on {topics.WEIGHTS.name}; it has {known}")
    published = versions.published[version]
    bare = Lineage(
        policy=policy,
        version=version,
        parent=published.parent,
        manifest_key=published.manifest_key,
        batch_id=published.batch_id,
        parent_key=published.parent_key,
    )
    if not published.batch_id:
        return bare
    found = await batch_lineage(event_log, published.batch_id)
    return msgspec.structs.replace(
        bare,
        batch_ordinal=found.ordinal,
        assembler_version=found.assembler_version,
        metrics=found.metrics,
        left_out=found.left_out,
        groups=found.groups,
        subjects=found.subjects,
    )


async def batch_lineage(event_log: EventLog, wanted: str) -> BatchLineage:
    """The batch of this id, or the only one whose id begins so. Raises Terminal if there is none, or several."""
    batches: dict[str, tuple[str, BatchAssembled]] = {}
    steps: dict[str, StepCompleted] = {}
    async for record in readable(event_log, topics.BATCHES.name):
        body = record.event.body
        if isinstance(body, BatchAssembled) and body.batch_id.startswith(wanted):
            batches[body.batch_id] = (str(record.ref), body)
        elif isinstance(body, StepCompleted):
            steps[body.batch_id] = body
    if wanted not in batches and len(batches) != 1:
        what = f"{len(batches)} batches begin with" if batches else "no batch"
        raise Terminal(f"{what} {wanted!r} on {topics.BATCHES.name}; `odradek batch list` shows what there is")
    at, batch = batches[wanted] if wanted in batches else next(iter(batches.values()))
    step = steps.get(batch.batch_id)
    return BatchLineage(
        batch_id=batch.batch_id,
        lane=batch.lane,
        policy=batch.policy,
        ordinal=batch.ordinal,
        at=at,
        assembler_version=batch.assembler_version,
        config_offset=batch.config_offset,
        input_offset=batch.input_offset,
        subjects_offset=batch.subjects_offset,
        merkle_root=batch.merkle_root,
        version=step.step if step is not None else None,
        manifest_key=step.manifest_key if step is not None else "",
        metrics=dict(step.metrics) if step is not None else {},
        left_out=list(step.left_out) if step is not None else [],
        groups=_groups(batch, await _opened(event_log)),
        dropped=batch.dropped,
        subjects=sorted({member.subject for member in batch.members if member.subject}),
    )


async def _opened(event_log: EventLog) -> dict[str, GroupOpened]:
    found: dict[str, GroupOpened] = {}
    async for body in bodies(event_log, topics.GROUPS.name):
        if isinstance(body, GroupOpened):
            found[body.group_id] = body
    return found


def _groups(batch: BatchAssembled, tasks: dict[str, GroupOpened]) -> list[TrainedGroup]:
    by_group: dict[str, list[BatchMember]] = {}
    for member in batch.members:
        by_group.setdefault(member.group_id, []).append(member)
    return [_group(group, members, tasks.get(group)) for group, members in by_group.items()]


def _group(group: str, members: list[BatchMember], opened: GroupOpened | None) -> TrainedGroup:
    return TrainedGroup(
        group_id=group,
        task_id=opened.task_id if opened is not None else "",
        task=str(opened.task) if opened is not None else "",
        labels=opened.labels if opened is not None else {},
        members=members,
    )


class EventAt(msgspec.Struct, frozen=True):
    """One event that a member's tokens come from."""

    at: str
    type: str
    id: str


async def events_of(event_log: EventLog, members: Collection[BatchMember]) -> dict[str, list[EventAt]]:
    """By session the events that count, exactly those that the batch names. A session that can't be read is absent."""
    extents = [Extent(m.session_id, m.partition, m.first_offset, m.last_offset) for m in members]
    places = {extent.session_id: extent.partition for extent in extents}

    def shown(session: str, record: SessionRecord) -> EventAt:
        offset, identifier, _, body = record
        at = f"{topics.SESSIONS.name}/{places[session]}@{offset}"
        return EventAt(at, str(body.__struct_config__.tag), identifier)

    found = await read_sessions(event_log, extents)
    return {session: [shown(session, record) for record in accepted(records)] for session, records in found.items()}
