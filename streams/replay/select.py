"""Which finished sessions a person asked for: a filter over the log, and what small topics say of each session.

Reads groups.v1, rewards.v1, batches.v1 and subjects.v1 whole, and of sessions.v1 only openings and ends (the type is in
the headers, so that tokens are not decoded here). Result: `Selected` in order of (partition, first offset), and for
every session left out a counted reason. Rules that no filter can lift: only finished sessions; production only where
its subject's consent to train stands now. Evaluation is left out unless asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from odradek.streams import topics
from odradek.streams.codec import registry
from odradek.streams.envelope import Record
from odradek.streams.errors import DecodeError
from odradek.streams.events.batches import BatchAssembled, BatchMember
from odradek.streams.events.groups import GroupOpened, MemberReplaced
from odradek.streams.events.meta import Meta, Origin
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import SessionCompleted, SessionFailed, SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents

Say = Callable[[str], None]

WANTED_TYPES = frozenset(kind.__struct_config__.tag for kind in (SessionOpened, SessionCompleted, SessionFailed))
"""The records of sessions.v1 that selection decodes."""


class OffsetRange(msgspec.Struct, frozen=True):
    """Sessions that open at these offsets of one partition of sessions.v1, both inclusive."""

    partition: int
    first: int
    last: int


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; every condition given must hold. Empty means no condition."""

    since: datetime | None = None
    """Opened at or after this time (the broker's record time)."""
    until: datetime | None = None
    """Opened before this time."""
    offsets: tuple[OffsetRange, ...] = ()
    """Opened within one of these ranges."""
    versions: tuple[int, int] | None = None
    """Every sampled token is of a version in this range, both ends inclusive."""
    tasks: frozenset[str] = frozenset()
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that the task must have, all of them."""
    min_reward: float | None = None
    max_reward: float | None = None
    """Bounds of the total, inclusive; a session without a reward satisfies neither."""
    origins: frozenset[Origin] = frozenset({"rl", "production"})
    trained: bool = False
    """Only members of an assembled batch."""


@dataclass(frozen=True, slots=True)
class Selected:
    """One session, and what other topics say of it."""

    session_id: str
    partition: int
    first_offset: int
    last_offset: int
    opened_ms: int
    meta: Meta
    opened: SessionOpened
    group: GroupOpened | None
    reward: RewardAssigned | None
    batch: BatchAssembled | None
    member: BatchMember | None


@dataclass(slots=True)
class Selection:
    """What was found."""

    sessions: list[Selected] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Sessions seen in the range and not selected, by reason."""


@dataclass(slots=True)
class _Around:
    """The small topics, by session."""

    groups: dict[str, GroupOpened] = field(default_factory=dict)
    rewards: dict[str, RewardAssigned] = field(default_factory=dict)
    members: dict[str, list[tuple[BatchAssembled, BatchMember]]] = field(default_factory=dict)
    consents: Consents = field(default_factory=Consents)


@dataclass(slots=True)
class _Seen:
    """A session while its partition is scanned."""

    offset: int
    opened_ms: int
    meta: Meta
    opened: SessionOpened
    last: int = -1
    failed: bool = False


async def select(event_log: EventLog, wanted: Filter, say: Say = lambda _text: None) -> Selection:
    """Everything on the log that the filter wants, as of now."""
    around = await _around(event_log)
    selection = Selection()
    for partition, start in sorted((await _starts(event_log, wanted)).items()):
        seen, broken = await _scan(event_log, partition, start)
        selection.left_out["undecodable"] += broken
        for session_id, one in sorted(seen.items(), key=lambda item: item[1].offset):
            chosen = _chosen(session_id, partition, one, around)
            reason = _reason(wanted, chosen, one, around.consents)
            if reason:
                selection.left_out[reason] += 1
            else:
                selection.sessions.append(chosen)
        say(f"sessions.v1/{partition}: {len(seen)} sessions seen, {len(selection.sessions)} selected so far")
    selection.left_out = +selection.left_out
    return selection


async def _starts(event_log: EventLog, wanted: Filter) -> dict[int, int]:
    """By partition the offset to scan from: no wanted session opens before it."""
    if wanted.offsets:
        partitions = {one.partition for one in wanted.offsets}
        return {p: min(one.first for one in wanted.offsets if one.partition == p) for p in partitions}
    if wanted.since is not None:
        return await event_log.offsets_for_time(topics.SESSIONS.name, wanted.since)
    numbers = await event_log.partitions(topics.SESSIONS.name)
    return {number: await event_log.beginning(topics.SESSIONS.name, number) for number in numbers}


async def _scan(event_log: EventLog, partition: int, start: int) -> tuple[dict[str, _Seen], int]:
    """Openings and ends from `start` on. A session that opened before is not seen, wherever it ends."""
    seen: dict[str, _Seen] = {}
    broken = 0
    async for record in event_log.read(topics.SESSIONS.name, partition, start):
        if (kind := _type_of(record)) not in WANTED_TYPES and kind in registry():
            continue
        try:
            event = record.event
        except DecodeError:
            broken += kind in WANTED_TYPES
            continue
        key = record.key or ""
        if isinstance(event.body, SessionOpened):
            seen.setdefault(key, _Seen(record.ref.offset, record.timestamp_ms, event.meta, event.body))
        elif isinstance(event.body, SessionCompleted | SessionFailed) and key in seen:
            seen[key].last = record.ref.offset
            seen[key].failed = isinstance(event.body, SessionFailed)
    return seen, broken


def _type_of(record: Record) -> str:
    raw = next((value for name, value in record.headers if name == "ce_type"), None)
    return (raw or b"").decode("utf-8", "replace")


def _chosen(session_id: str, partition: int, one: _Seen, around: _Around) -> Selected:
    reward = around.rewards.get(session_id)
    batch, member = _batch(one.opened.lane, around.members.get(session_id, []))
    return Selected(
        session_id=session_id,
        partition=partition,
        first_offset=reward.first_offset if reward is not None else one.offset,
        last_offset=reward.last_offset if reward is not None else one.last,
        opened_ms=one.opened_ms,
        meta=one.meta,
        opened=one.opened,
        group=around.groups.get(session_id),
        reward=reward,
        batch=batch,
        member=member,
    )


def _batch(
    lane: str, held: list[tuple[BatchAssembled, BatchMember]]
) -> tuple[BatchAssembled, BatchMember] | tuple[None, None]:
    """The batch of the session's own lane, before one that a rescored lane made of it later."""
    return min(held, key=lambda one: one[0].lane != lane, default=(None, None))


def _reason(wanted: Filter, one: Selected, seen: _Seen, consents: Callable[[str], bool]) -> str | None:
    """Why the session is left out; None keeps it. Versions are judged by the tokens themselves (`export.py`)."""
    if one.last_offset < 0:
        return "unfinished"
    if seen.failed:
        return "failed"
    if one.meta.origin not in wanted.origins:
        return f"origin {one.meta.origin}"
    if one.meta.origin == "production" and not consents(one.meta.subject):
        return "consent"
    ranges = wanted.offsets
    if ranges and not any(r.partition == one.partition and r.first <= seen.offset <= r.last for r in ranges):
        return "offsets"
    since, until = (when.timestamp() * 1000 if when else None for when in (wanted.since, wanted.until))
    if (since is not None and one.opened_ms < since) or (until is not None and one.opened_ms >= until):
        return "time"
    task = one.group.task_id if one.group is not None else ""
    labels = one.group.labels if one.group is not None else {}
    if wanted.tasks and task not in wanted.tasks:
        return "task"
    if any(labels.get(name) != value for name, value in wanted.labels):
        return "label"
    if wanted.trained and one.member is None:
        return "not trained"
    return None if _reward_fits(wanted, one.reward) else "reward"


def _reward_fits(wanted: Filter, reward: RewardAssigned | None) -> bool:
    if wanted.min_reward is None and wanted.max_reward is None:
        return True
    if reward is None:
        return False
    return (wanted.min_reward is None or reward.total >= wanted.min_reward) and (
        wanted.max_reward is None or reward.total <= wanted.max_reward
    )


async def _around(event_log: EventLog) -> _Around:
    around = _Around()
    by_id: dict[str, GroupOpened] = {}
    async for body in bodies(event_log, topics.GROUPS.name):
        if isinstance(body, GroupOpened):
            by_id[body.group_id] = body
            around.groups.update(dict.fromkeys(body.sessions, body))
        elif isinstance(body, MemberReplaced) and body.group_id in by_id:
            around.groups[body.new_session] = by_id[body.group_id]
    async for body in bodies(event_log, topics.REWARDS.name):
        if isinstance(body, RewardAssigned):
            around.rewards.setdefault(body.session_id, body)
    async for body in bodies(event_log, topics.BATCHES.name):
        if isinstance(body, BatchAssembled):
            for member in body.members:
                around.members.setdefault(member.session_id, []).append((body, member))
    await around.consents.refresh(event_log)
    return around


async def readable(event_log: EventLog, topic: str) -> AsyncIterator[Record]:
    """The records of a whole topic, partition by partition; what can't be decoded is passed over. A type that this
    build does not know raises: what follows from the rest would be wrong."""
    for number, end in sorted((await event_log.stable_ends(topic)).items()):
        async for record in event_log.read(topic, number, await event_log.beginning(topic, number), end):
            try:
                _ = record.event
            except DecodeError:
                continue
            yield record


async def bodies(event_log: EventLog, topic: str) -> AsyncIterator[Any]:
    """The bodies of `readable`."""
    async for record in readable(event_log, topic):
        yield record.event.body


def describe(wanted: Filter) -> Mapping[str, Any]:
    """The filter as JSON values, without what is not given; written into what is exported."""
    shown = msgspec.to_builtins(wanted)
    shown["tasks"], shown["origins"] = sorted(wanted.tasks), sorted(wanted.origins)
    return {name: value for name, value in shown.items() if value not in (None, [], (), False)}
