"""Where a branch begins: a version, by its number or by any offset of the topics that say what was trained when.

Topics do not interleave, so an offset of another topic names no moment of training and is refused.
"""

from __future__ import annotations

import re

from odradek.streams import topics
from odradek.streams.errors import Terminal
from odradek.streams.events.batches import BatchAssembled, IncarnationBegun, StepCompleted
from odradek.streams.events.groups import ParentVersion
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.lineage import versions_of
from odradek.streams.replay.select import readable

MAIN_PARTITIONS = (0, 1)
"""Of groups.v1: the RL and the evaluation lane's, which only the controller of the main line writes."""

PLACE = re.compile(r"(?P<topic>[a-z.0-9]+)/(?P<partition>\d+)@(?P<offset>\d+)")


def check_branch(lane: str, policy: str, parent: ParentVersion) -> None:
    """Raises Terminal for a lane or a policy that is not the branch's own."""
    if topics.GROUPS.partition_of(lane) in MAIN_PARTITIONS:
        free = [str(n) for n in range(topics.GROUPS.partitions) if n not in MAIN_PARTITIONS]
        raise Terminal(f"lane {lane!r} would lie in the main line's partitions: end its name in -{' or -'.join(free)}")
    if policy == parent.policy:
        raise Terminal(f"policy {policy!r} is the parent's own: a branch is a new policy id")


async def branch_point(event_log: EventLog, policy: str, wanted: str) -> ParentVersion:
    """The version that `wanted` names: `3`, or `TOPIC/PARTITION@OFFSET` for the one in force there. Raises Terminal."""
    published = (await versions_of(event_log, policy)).published
    if not published:
        raise Terminal(f"policy {policy} has no version on {topics.WEIGHTS.name} to branch off")
    place = PLACE.fullmatch(wanted)
    if place is not None:
        ref = RecordRef(place["topic"], int(place["partition"]), int(place["offset"]))
        version = await _in_force(event_log, policy, ref, min(published))
    elif wanted.isdecimal():
        version = int(wanted)
    else:
        raise Terminal(f"{wanted!r} is no version and no TOPIC/PARTITION@OFFSET")
    if version not in published:
        known = ", ".join(map(str, sorted(published)))
        raise Terminal(f"policy {policy} has no version {version} (asked for by {wanted!r}); it has {known}")
    found = published[version]
    return ParentVersion(
        policy=policy, version=version, manifest_key=found.manifest_key, manifest_sha256=found.manifest_sha256
    )


async def _in_force(event_log: EventLog, policy: str, ref: RecordRef, first: int) -> int:
    """The newest version at this place: published (weights.v1), trained (batches.v1), or trained on all that is before
    (groups.v1)."""
    if ref.topic not in (topics.WEIGHTS.name, topics.BATCHES.name, topics.GROUPS.name):
        raise Terminal(
            f"{ref}: no moment of training; give an offset of {topics.WEIGHTS.name}, {topics.BATCHES.name} or "
            f"{topics.GROUPS.name}, or a version"
        )
    version = first
    source = topics.BATCHES.name if ref.topic == topics.GROUPS.name else ref.topic
    async for record in readable(event_log, source):
        body = record.event.body
        if record.ref.partition != ref.partition or getattr(body, "policy", None) != policy:
            continue
        before = record.ref.offset <= ref.offset
        match body:
            case VersionPublished() if before:
                version = body.version
            case StepCompleted() if before and ref.topic == topics.BATCHES.name:
                version = body.step
            case IncarnationBegun() if before and ref.topic == topics.BATCHES.name:
                version = body.version
            case BatchAssembled() if body.input_offset <= ref.offset and ref.topic == topics.GROUPS.name:
                version = body.ordinal + 1
            case _:
                pass
    return version
