"""From data forward: which batches hold a session, and which weight versions its tokens reached. From the log alone.

A version is reached when a step on such a batch made it (members left out at the step reach nothing), or when it was
made from a reached one: later steps, branches to another policy, a restore into another incarnation. We never claim
that weights forgot.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from odradek.streams import topics
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupOpened, MemberReplaced
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies, readable


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """One batch that holds wanted sessions."""

    batch_id: str
    lane: str
    policy: str
    ordinal: int
    at: str
    sessions: list[str]
    left_out: list[str]
    """Of these, sessions that got zero weight at the step."""
    version: int | None
    """The version that its step made; none while it is not trained."""


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """One weight version that the sessions' tokens reached."""

    policy: str
    version: int
    manifest_key: str
    how: str
    """trained: a step on a batch that holds them made it; inherited: it was made from such a version."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Where data went."""

    sessions: list[str]
    batches: list[Sighting]
    versions: list[Reached]


async def sessions_of_task(event_log: EventLog, task_id: str) -> list[str]:
    """Every attempt at a task, fresh attempts after faults included, in opening order."""
    groups: dict[str, list[str]] = {}
    async for body in bodies(event_log, topics.GROUPS.name):
        if isinstance(body, GroupOpened) and body.task_id == task_id:
            groups.setdefault(body.group_id, []).extend(body.sessions)
        elif isinstance(body, MemberReplaced) and body.group_id in groups:
            groups[body.group_id].append(body.new_session)
    return [session for sessions in groups.values() for session in sessions]


async def sessions_of_subject(event_log: EventLog, subject: str) -> list[str]:
    """Every session of a subject that is a member of a batch."""
    found: dict[str, None] = {}
    async for body in bodies(event_log, topics.BATCHES.name):
        if isinstance(body, BatchAssembled):
            found |= {member.session_id: None for member in body.members if member.subject == subject}
    return list(found)


async def seen(event_log: EventLog, sessions: Collection[str]) -> Seen:
    """Every batch that holds one of the sessions, and every version that their tokens reached."""
    wanted = frozenset(sessions)
    held: dict[str, Sighting] = {}
    trained: set[str] = set()
    async for record in readable(event_log, topics.BATCHES.name):
        match record.event.body:
            case BatchAssembled() as batch:
                inside = [m.session_id for m in batch.members if m.session_id in wanted]
                if inside:
                    held[batch.batch_id] = Sighting(
                        batch_id=batch.batch_id,
                        lane=batch.lane,
                        policy=batch.policy,
                        ordinal=batch.ordinal,
                        at=str(record.ref),
                        sessions=inside,
                        left_out=[],
                        version=None,
                    )
            case StepCompleted() as step if step.batch_id in held:
                one = held[step.batch_id]
                left_out = [session for session in one.sessions if session in step.left_out]
                held[step.batch_id] = msgspec.structs.replace(one, left_out=left_out, version=step.step)
                if len(left_out) < len(one.sessions):
                    trained.add(step.manifest_key)
    published = [body async for body in bodies(event_log, topics.WEIGHTS.name) if isinstance(body, VersionPublished)]
    return Seen(sessions=sorted(wanted), batches=list(held.values()), versions=_reached(published, trained))


def _reached(published: list[VersionPublished], trained: Collection[str]) -> list[Reached]:
    """The versions that were trained on the data and all that were made from them; a parent is published first."""
    reached: dict[str, Reached] = {}
    for one in published:
        how = "trained" if one.manifest_key in trained else "inherited" if parent_key(one) in reached else ""
        if how and one.manifest_key not in reached:
            reached[one.manifest_key] = Reached(
                policy=one.policy, version=one.version, manifest_key=one.manifest_key, how=how
            )
    return list(reached.values())


def parent_key(published: VersionPublished) -> str:
    """The manifest of the version that this one was made from; empty for the first of all."""
    if published.parent_key or published.parent is None:
        return published.parent_key
    place, _, _ = published.manifest_key.rpartition("/")
    return f"{place}/{published.parent}"
