"""A lane's recorded groups, sealed again under a later grader's rewards, in a lane and for a policy of their own.

Writes groups.v1 in a partition that the controller does not write: the lane's configuration, then for each recorded
seal that counts, in order, its group's opening and a seal that names the revised verdicts. Which groups, which members
and in which order is a function of the old lane and of the revised verdicts alone, so two such lanes give the same
batches. Writing it twice writes it once. The old lane is only read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from odradek.streams import topics
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import DecodeError, Terminal
from odradek.streams.events.groups import (
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    ParentVersion,
    SealedMember,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.replay.branch import check_branch
from odradek.streams.replay.rebuild import LaneSeals, batches_of
from odradek.streams.transactions import Stage

SOURCE = "odradek-rescore"
GROUPS_AT_ONCE = 200
"""Groups in one transaction. Too few: 30 ms each add up. Too many: the transaction's time-out."""


async def seals_from(event_log: EventLog, lane: str, version: int) -> list[tuple[int, GroupSealed]]:
    """The lane's seals that count, from those that trained `version` into the next on."""
    after = -1
    async for _, batch in batches_of(event_log, lane):
        if batch.ordinal < version:
            after = batch.input_offset
    end = await event_log.stable_end(topics.GROUPS.name, topics.GROUPS.partition_of(lane))
    return await LaneSeals(event_log, lane).between(after, end - 1)


async def configuration_of(event_log: EventLog, lane: str) -> LaneConfigured | None:
    """The newest configuration of a lane; None where there is no such lane."""
    configured = [body for _, body in await _lane(event_log, lane) if isinstance(body, LaneConfigured)]
    return configured[-1] if configured else None


def new_lane(old: LaneConfigured, lane: str, policy: str, parent: ParentVersion) -> LaneConfigured:
    """The configuration of the lane that trains `parent` on over what is recorded. Raises Terminal."""
    check_branch(lane, policy, parent)
    return msgspec.structs.replace(old, lane=lane, policy=policy, parent=parent, tasks_low=[])


async def reseal(
    event_log: EventLog,
    config: LaneConfigured,
    source: str,
    seals: list[tuple[int, GroupSealed]],
    revised: Mapping[str, RecordRef],
) -> int:
    """Write the lane; returns the offset of its last seal. Raises Terminal if the lane is there and is another one."""
    number = topics.GROUPS.partition_of(config.lane)
    opened = await _openings(event_log, source)
    wanted: list[GroupEvent] = [config]
    for offset, seal in seals:
        again = _sealed(config.lane, source, offset, seal, revised)
        sessions = [member.session_id for member in again.members]
        wanted += [msgspec.structs.replace(opened[seal.group_id], lane=config.lane, sessions=sessions), again]
    async with Stage(event_log, f"rescore.{config.lane}", [(topics.GROUPS.name, number)]) as stage:
        there = await _lane(event_log, config.lane)
        if [body for _, body in there] != wanted[: len(there)]:
            raise Terminal(f"lane {config.lane} is on the log already, made of something else: take another name")
        last = there[-1][0] if there else -1
        missing = wanted[len(there) :]
        for at in range(0, len(missing), 2 * GROUPS_AT_ONCE):
            async with stage.transaction() as transaction:
                part = missing[at : at + 2 * GROUPS_AT_ONCE]
                refs = await transaction.append_many((topics.GROUPS.name, config.lane, _event(body)) for body in part)
            last = refs[-1].offset
        await event_log.wait_stable(topics.GROUPS.name, number, last + 1)
    return last


def _sealed(lane: str, source: str, offset: int, seal: GroupSealed, revised: Mapping[str, RecordRef]) -> GroupSealed:
    """The same cut. A member that the later grader can never judge has no reward and stays out of the mean."""
    members = [
        msgspec.structs.replace(member, reward=revised[member.session_id])
        if member.session_id in revised
        else SealedMember(session_id=member.session_id, status="ungraded" if member.reward else member.status)
        for member in seal.members
    ]
    ref = RecordRef(topics.GROUPS.name, topics.GROUPS.partition_of(source), offset)
    return msgspec.structs.replace(seal, lane=lane, members=members, rescored=ref)


async def _openings(event_log: EventLog, lane: str) -> dict[str, GroupOpened]:
    return {body.group_id: body for _, body in reversed(await _lane(event_log, lane)) if isinstance(body, GroupOpened)}


async def _lane(event_log: EventLog, lane: str) -> list[tuple[int, GroupEvent]]:
    """Everything on groups.v1 of one lane, by offset."""
    number = topics.GROUPS.partition_of(lane)
    start = await event_log.beginning(topics.GROUPS.name, number)
    found = []
    async for record in event_log.read(topics.GROUPS.name, number, start):
        try:
            body = record.event.body
        except DecodeError:
            continue
        if body.lane == lane:
            found.append((record.ref.offset, body))
    return found


def _event(body: GroupEvent) -> Event[GroupEvent]:
    group = getattr(body, "group_id", "")
    return Event.of(body, id=event_id("rescore", body.lane, group, type(body).__name__), source=SOURCE)
