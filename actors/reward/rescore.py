"""Scores history again with another grader, and says so beside the old verdicts: nothing that was is changed.

Consumes a lane's seals that count, the verdicts that they name, and the records of their members. Produces
reward.revised, one a member and grader version, whose id follows from both: what a run has written already is not
graded again, so that a killed run goes on, and two runs say the same. Past batches refer to the verdicts by their
offsets and stay what they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward.efficiency import Conduct, conduct_of
from odradek.actors.reward.errors import GraderCouldNotRun, NotRescored
from odradek.actors.reward.grader import Grade
from odradek.actors.reward.graders import Case, Grader
from odradek.streams import topics
from odradek.streams.assembly.reader import Extent, read_sessions
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.groups import GroupSealed, SealedMember
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardRevised
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import readable

Say = Callable[[str], None]

CHUNK = 32
"""Sessions read and graded at a time. Too few: partitions are read in many small pieces. Too many: memory."""
ATTEMPTS = 3
"""Tries of a grader that could not run for a fault of ours, before the command gives up."""
SOURCE = "odradek-rescore"


@dataclass(slots=True)
class Rescored:
    """What a grader said of history."""

    revised: dict[str, RecordRef] = field(default_factory=dict)
    """By session its reward.revised."""
    changed: int = 0
    """Members whose total is another one than before."""
    appended: int = 0
    """Of `revised`, those that this run wrote."""
    unfit: dict[str, str] = field(default_factory=dict)
    """By session why this grader can never judge it: it stays out of its group's mean."""


async def rescore(
    event_log: EventLog,
    grader: Grader,
    seals: list[tuple[int, GroupSealed]],
    reason: str,
    *,
    factory: SandboxFactory | None = None,
    at_once: int = 1,
    say: Say = lambda _text: None,
) -> Rescored:
    """Every rewarded member of the seals, scored by `grader`. Raises NotRescored where that was not possible now."""
    done = Rescored()
    verdicts, known = await _verdicts(event_log, grader)
    members = [m for _, seal in seals for m in seal.members if m.status == "rewarded" and m.reward is not None]
    for member in members:
        if member.session_id in known:
            done.revised[member.session_id], total = known[member.session_id]
            done.changed += total != _stood(verdicts, member).total
    fresh = [member for member in members if member.session_id not in known]
    tasks: dict[RecordRef, TaskPublished] = {}
    for at in range(0, len(fresh), CHUNK):
        await _chunk(event_log, grader, fresh[at : at + CHUNK], verdicts, tasks, reason, factory, at_once, done)
        say(f"{len(done.revised) + len(done.unfit)} of {len(members)} sessions scored by {grader}")
    return done


async def _verdicts(
    event_log: EventLog, grader: Grader
) -> tuple[dict[RecordRef, tuple[RewardAssigned, Meta]], dict[str, tuple[RecordRef, float]]]:
    """All verdicts by place, and by session what this grader version has said before (the first counts)."""
    verdicts: dict[RecordRef, tuple[RewardAssigned, Meta]] = {}
    known: dict[str, tuple[RecordRef, float]] = {}
    async for record in readable(event_log, topics.REWARDS.name):
        match record.event.body:
            case RewardAssigned() as body:
                verdicts[record.ref] = (body, record.event.meta)
            case RewardRevised() as body if (body.grader, body.grader_version) == (grader.name, grader.version):
                known.setdefault(body.session_id, (record.ref, body.total))
            case _:
                pass
    return verdicts, known


def _stood(verdicts: dict[RecordRef, tuple[RewardAssigned, Meta]], member: SealedMember) -> RewardAssigned:
    assert member.reward is not None
    return verdicts[member.reward][0]


async def _chunk(
    event_log: EventLog,
    grader: Grader,
    members: list[SealedMember],
    verdicts: dict[RecordRef, tuple[RewardAssigned, Meta]],
    tasks: dict[RecordRef, TaskPublished],
    reason: str,
    factory: SandboxFactory | None,
    at_once: int,
    done: Rescored,
) -> None:
    extents = [Extent(m.session_id, m.partition, m.first_offset, m.last_offset) for m in members]
    records = await read_sessions(event_log, extents)
    slots = asyncio.Semaphore(at_once)
    judged: dict[str, Grade] = {}
    faults: list[str] = []

    async def judge(member: SealedMember) -> None:
        session = member.session_id
        if session not in records or member.reward not in verdicts:
            done.unfit[session] = "its records, or its verdict, can't be decoded"
            return
        try:
            conduct = conduct_of(records[session])
            case = Case(await _task(event_log, conduct, tasks), conduct, _stood(verdicts, member))
            async with slots:
                judged[session] = await _graded(grader, case, factory)
        except GraderCouldNotRun as error:
            if error.retryable:
                faults.append(f"session {session}: {error.cause}")
            else:
                done.unfit[session] = error.cause

    await asyncio.gather(*map(judge, members))
    events = [_event(grader, m, *verdicts[m.reward], judged[m.session_id], reason)
              for m in members if m.session_id in judged and m.reward is not None]  # fmt: skip
    refs = await event_log.append_many(topics.REWARDS.name, [(event.body.session_id, event) for event in events])
    for event, ref in zip(events, refs, strict=True):
        done.revised[event.body.session_id] = ref
        done.appended += 1
        assert event.body.revises is not None
        done.changed += event.body.total != verdicts[event.body.revises][0].total
    if faults:
        raise NotRescored(f"{grader} could not run for {len(faults)} sessions, first {faults[0]}; run it again")


async def _graded(grader: Grader, case: Case, factory: SandboxFactory | None) -> Grade:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return await grader.run(case, factory)
        except GraderCouldNotRun as error:
            if not error.retryable or attempt == ATTEMPTS:
                raise
    raise AssertionError("the loop returns or raises")


async def _task(event_log: EventLog, conduct: Conduct, tasks: dict[RecordRef, TaskPublished]) -> TaskPublished:
    ref = conduct.opened.task if conduct.opened is not None else None
    if ref is None:
        raise GraderCouldNotRun("the session has no task to grade against", retryable=False)
    if ref not in tasks:
        body = (await event_log.read_ref(ref)).event.body
        if not isinstance(body, TaskPublished):
            raise GraderCouldNotRun(f"{ref} holds no task", retryable=False)
        tasks[ref] = body
    return tasks[ref]


def _event(
    grader: Grader, member: SealedMember, stood: RewardAssigned, meta: Meta, result: Grade, reason: str
) -> Event[RewardRevised]:
    body = RewardRevised(
        session_id=member.session_id,
        group_id=stood.group_id,
        grader=grader.name,
        grader_version=grader.version,
        components=dict(result.components),
        total=result.total,
        reason=reason,
        revises=member.reward,
        partition=member.partition,
        first_offset=member.first_offset,
        last_offset=member.last_offset,
        sampled_tokens=stood.sampled_tokens,
    )
    identifier = event_id("rescore", member.session_id, grader.name, grader.version)
    return Event.of(body, id=identifier, source=SOURCE, meta=meta)
