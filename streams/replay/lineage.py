"""From a weight version back to what it was trained on: version, step, batch, members, tasks; from the log alone.

One step back; the parent's own lineage is asked for by its number. Also the fold of weights.v1 that people are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from odradek.streams import topics
from odradek.streams.errors import DecodeError, Terminal, UnknownEventType
from odradek.streams.events.batches import BatchAssembled, BatchMember, StepCompleted
from odradek.streams.events.groups import GroupOpened
from odradek.streams.events.weights import (
    CurrentWeights,
    ReplicaReported,
    VersionPinned,
    VersionPublished,
    VersionRolledBack,
)
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies


@dataclass(slots=True)
class Versions:
    """One policy's versions and how they are served, in the order of weights.v1."""

    policy: str
    published: dict[int, VersionPublished] = field(default_factory=dict)
    published_ms: dict[int, int] = field(default_factory=dict)
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
                self.published[body.version], self.published_ms[body.version] = body, time_ms
                if self.rolled_back_to is not None and body.version > self.rolled_back_to:
                    self.rolled_back_to = None
            case VersionPinned():
                self.pinned = body.version
            case VersionRolledBack():
                self.rolled_back_to = body.to_version
            case CurrentWeights():
                self.current = body.version
            case ReplicaReported():
                self.replicas[body.replica] = body
            case _:
                pass


async def versions_of(event_log: EventLog, policy: str) -> Versions:
    """The fold of everything that is on the log now."""
    versions = Versions(policy)
    for topic in (topics.WEIGHTS.name, topics.WEIGHTS_CURRENT.name, topics.REPLICAS.name):
        async for record in event_log.read(topic, 0, await event_log.beginning(topic, 0)):
            try:
                versions.apply(record.event.body, record.timestamp_ms)
            except (DecodeError, UnknownEventType):
                continue
    return versions


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
    """Empty for a version that no batch made (the warm start)."""
    batch_ordinal: int = -1
    assembler_version: int = 0
    metrics: dict[str, float] = {}
    """The step's."""
    left_out: list[str] = []
    """Members whose consent was gone at the step: zero weight."""
    groups: list[TrainedGroup] = []
    subjects: list[str] = []
    """Whose production sessions are among the members."""


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
    )
    return bare if not published.batch_id else await _of_batch(event_log, bare)


async def _of_batch(event_log: EventLog, bare: Lineage) -> Lineage:
    batch: BatchAssembled | None = None
    step: StepCompleted | None = None
    async for body in bodies(event_log, topics.BATCHES.name):
        if isinstance(body, BatchAssembled | StepCompleted) and body.batch_id == bare.batch_id:
            batch, step = (body, step) if isinstance(body, BatchAssembled) else (batch, body)
    if batch is None:
        raise Terminal(f"version {bare.version} names batch {bare.batch_id}, which is not on {topics.BATCHES.name}")
    tasks: dict[str, GroupOpened] = {}
    async for body in bodies(event_log, topics.GROUPS.name):
        if isinstance(body, GroupOpened):
            tasks[body.group_id] = body
    by_group: dict[str, list[BatchMember]] = {}
    for member in batch.members:
        by_group.setdefault(member.group_id, []).append(member)
    return msgspec.structs.replace(
        bare,
        batch_ordinal=batch.ordinal,
        assembler_version=batch.assembler_version,
        metrics=dict(step.metrics) if step is not None else {},
        left_out=list(step.left_out) if step is not None else [],
        groups=[_group(group, members, tasks.get(group)) for group, members in by_group.items()],
        subjects=sorted({member.subject for member in batch.members if member.subject}),
    )


def _group(group: str, members: list[BatchMember], opened: GroupOpened | None) -> TrainedGroup:
    return TrainedGroup(
        group_id=group,
        task_id=opened.task_id if opened is not None else "",
        task=str(opened.task) if opened is not None else "",
        labels=opened.labels if opened is not None else {},
        members=members,
    )
