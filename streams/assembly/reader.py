"""Fetches exactly the records that a group's seal or a batch names.

Sessions of one partition overlap, so their ranges are read as unions, one pass a partition, and sorted by key.
A record that can't be decoded makes its session undecodable: it is left out of the result, for ever, with the reason
in the log. Never guesses: nothing outside the named offsets is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from odradek.streams.assembly.v1.select import GroupRecords
from odradek.streams.assembly.v1.sequence import MalformedSession, Sequence, sequence_of
from odradek.streams.errors import DecodeError
from odradek.streams.events.groups import GroupSealed
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardRevised
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord
from odradek.streams.topics import declared

log = logging.getLogger(__name__)

SESSIONS = "sessions.v1"
REWARDS = "rewards.v1"
MERGE_GAP = 500
"""Records between two ranges that are read through rather than skipped: a seek costs about as much. Too low: many
seeks; too high: reads records that nobody wants."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one session's records lie, both offsets inclusive."""

    session_id: str
    partition: int
    first: int
    last: int


def unions(extents: Iterable[Extent]) -> dict[int, list[tuple[int, int]]]:
    """By partition the ranges [first, last] to read, ascending, near ones merged."""
    by_partition: dict[int, list[tuple[int, int]]] = {}
    for extent in sorted(extents, key=lambda e: (e.partition, e.first)):
        ranges = by_partition.setdefault(extent.partition, [])
        if ranges and extent.first <= ranges[-1][1] + MERGE_GAP:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], extent.last))
        else:
            ranges.append((extent.first, extent.last))
    return by_partition


async def read_sessions(event_log: EventLog, extents: Iterable[Extent]) -> dict[str, list[SessionRecord]]:
    """By session id its records in log order. A session with an undecodable record is absent; one with a record of a
    type that this build does not know raises."""
    wanted = {e.session_id: e for e in extents}
    found: dict[str, list[SessionRecord]] = {session: [] for session in wanted}
    bad: set[str] = set()

    async def scan(partition: int, first: int, last: int) -> None:
        async for record in event_log.read(SESSIONS, partition, first, last + 1):
            extent = wanted.get(record.key or "")
            if extent is None or not extent.first <= record.ref.offset <= extent.last:
                continue
            try:
                event = record.event
            except DecodeError as error:
                log.warning("session %s is unfit for training: %s", extent.session_id, error)
                bad.add(extent.session_id)
                continue
            found[extent.session_id].append((record.ref.offset, event.id, event.meta, event.body))

    await _scanned(event_log, SESSIONS, wanted.values(), scan)
    return {session: records for session, records in found.items() if session not in bad}


async def read_sequences(event_log: EventLog, extents: Iterable[Extent]) -> dict[str, Sequence]:
    """By session id its canonical sequence; sessions that do not make one are absent."""
    sequences: dict[str, Sequence] = {}
    for session, records in (await read_sessions(event_log, extents)).items():
        try:
            sequences[session] = sequence_of(session, records)
        except MalformedSession as error:
            log.warning("session %s is unfit for training: %s", session, error)
    return sequences


async def read_rewards(event_log: EventLog, refs: Mapping[str, RecordRef]) -> dict[str, RewardAssigned]:
    """By session id the reward its seal names. A reference that holds something else is absent."""
    rewards: dict[str, RewardAssigned] = {}
    by_place = {(ref.partition, ref.offset): session for session, ref in refs.items()}
    extents = [Extent(session, ref.partition, ref.offset, ref.offset) for session, ref in refs.items()]

    async def scan(partition: int, first: int, last: int) -> None:
        async for record in event_log.read(REWARDS, partition, first, last + 1):
            session = by_place.get((partition, record.ref.offset))
            if session is None:
                continue
            try:
                body = _verdict(record.event.body)
            except DecodeError as error:
                log.warning("reward of session %s: %s", session, error)
                continue
            if body is not None and body.session_id == session:
                rewards[session] = body

    await _scanned(event_log, REWARDS, extents, scan)
    return rewards


def _verdict(body: object) -> RewardAssigned | None:
    """A verdict as assembly takes it. Only the seals of a rescored lane name a revised one."""
    match body:
        case RewardAssigned():
            return body
        case RewardRevised():
            return RewardAssigned(
                session_id=body.session_id,
                group_id=body.group_id,
                partition=body.partition,
                first_offset=body.first_offset,
                last_offset=body.last_offset,
                grader=body.grader,
                grader_version=body.grader_version,
                components=body.components,
                total=body.total,
                sampled_tokens=body.sampled_tokens,
            )
    return None


async def _scanned(
    event_log: EventLog, topic: str, extents: Iterable[Extent], scan: Callable[[int, int, int], Awaitable[None]]
) -> None:
    """Scans the ranges of the extents. What is said to lie past the topic's end, or before its beginning, is not
    there: waiting for it would stop the lane for a record that nobody owes."""
    ranges = unions(extents)
    numbers = [number for number in ranges if number in range(declared(topic).partitions)]
    ends = await event_log.stable_ends(topic, numbers) if numbers else {}
    parts = [(p, max(first, 0), min(last, ends[p] - 1)) for p in numbers for first, last in ranges[p]]
    await asyncio.gather(*(scan(p, first, last) for p, first, last in parts if first <= last))


async def read_group(event_log: EventLog, offset: int, sealed: GroupSealed) -> GroupRecords:
    """Everything that the seal at `offset` of groups.v1 refers to."""
    return (await read_groups(event_log, [(offset, sealed)]))[0]


async def read_groups(event_log: EventLog, seals: Iterable[tuple[int, GroupSealed]]) -> list[GroupRecords]:
    """Everything that the seals, by offset on groups.v1, refer to; read in one go, because groups overlap. Seals that
    name the same session are read apart: each is what it is alone, however many are asked for together."""
    seals = list(seals)
    named = [member.session_id for _, seal in seals for member in seal.members]
    if len(set(named)) == len(named):
        return await _read_groups(event_log, seals)
    return [group for seal in seals for group in await _read_groups(event_log, [seal])]


async def _read_groups(event_log: EventLog, seals: list[tuple[int, GroupSealed]]) -> list[GroupRecords]:
    members = [m for _, seal in seals for m in seal.members if m.status == "rewarded" and m.reward is not None]
    extents = [Extent(m.session_id, m.partition, m.first_offset, m.last_offset) for m in members]
    refs = {m.session_id: m.reward for m in members if m.reward is not None}
    rewards, sequences = await read_rewards(event_log, refs), await read_sequences(event_log, extents)
    return [
        GroupRecords(
            offset=offset,
            sealed=seal,
            rewards={session: one for session, one in rewards.items() if one.group_id == seal.group_id},
            sequences=sequences,
        )
        for offset, seal in seals
    ]
