"""One lane written to a real log by hand, as controller, session actors and graders would, for the loops that read it.

Each world has a lane, a policy and ids of its own, so that several share a deployment; partition 0 then holds other
lanes' records in between, as it does in production.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from odradek.streams.clients import consumer, partition, start, stop
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupOpened, GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, TurnSampled, Usage
from odradek.streams.events.subjects import ConsentGranted, ConsentWithdrawn
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import batches_of
from support.assembly_world import turn
from support.waiting import eventually

PATIENCE_S = 120.0
"""Longest wait of a test for a loop. No test depends on how long it really takes."""


@dataclass(frozen=True)
class Written:
    """A session on the log."""

    session_id: str
    partition: int
    first: int
    last: int
    meta: Meta


@dataclass
class LaneWorld:
    """Writes one lane."""

    log: EventLog
    settings: dict[str, Any] = field(default_factory=dict)
    lane: str = field(default_factory=lambda: f"lane-{uuid.uuid4().hex[:8]}-0")
    groups: int = 0

    @property
    def policy(self) -> str:
        return f"policy-of-{self.lane}"

    def configuration(self, **changes: Any) -> LaneConfigured:
        self.settings |= changes
        base: dict[str, Any] = {"groups_per_batch": 2, "attempts": 2, "max_staleness": 2}
        return LaneConfigured(lane=self.lane, policy=self.policy, **(base | self.settings))

    async def configure(self, **changes: Any) -> int:
        """Append the lane's configuration; returns its offset."""
        return (await self._append("groups.v1", self.lane, self.configuration(**changes))).offset

    async def _append(self, topic: str, key: str, body: Any, meta: Meta | None = None) -> RecordRef:
        identifier = event_id("lane-world", uuid.uuid4().hex)
        return await self.log.append(topic, key, Event.of(body, id=identifier, source="test", meta=meta))

    async def session(
        self,
        session_id: str,
        turns: Sequence[TurnSampled],
        *,
        origin: Origin = "rl",
        subject: str = "",
        poison: bytes | None = None,
        task: RecordRef | None = None,
    ) -> Written:
        """One session from its opening to its end. `poison`: a value that stands in place of its last turn."""
        meta = Meta(origin=origin, subject=subject)
        opened = SessionOpened(session_id=session_id, policy=self.policy, lane=self.lane, task=task)
        first = await self._append("sessions.v1", session_id, opened, meta)
        bodies = [*turns, SessionCompleted(reason="done", first_offset=first.offset, usage=Usage())]
        ref = first
        for seq, body in enumerate(bodies):
            owner = Meta(origin=origin, subject=subject, epoch=first.offset, seq=seq)
            if poison is not None and body is turns[-1]:
                ref = await self.log.append_raw("sessions.v1", session_id.encode(), poison, TURN_HEADERS)
            else:
                ref = await self._append("sessions.v1", session_id, body, owner)
        return Written(session_id, first.partition, first.offset, ref.offset, meta)

    async def member(
        self, session: Written, group: str, total: float, *, solved: float | None = None, tokens: int = 4
    ) -> SealedMember:
        """The session's reward on the log, and what the seal says of both."""
        reward = RewardAssigned(
            session_id=session.session_id,
            group_id=group,
            partition=session.partition,
            first_offset=session.first,
            last_offset=session.last,
            grader="g",
            grader_version="1",
            components={"solved": float(total > 0) if solved is None else solved},
            total=total,
            sampled_tokens=tokens,
        )
        ref = await self._append("rewards.v1", session.session_id, reward, session.meta)
        return SealedMember(
            session_id=session.session_id,
            status="rewarded",
            partition=session.partition,
            first_offset=session.first,
            last_offset=session.last,
            reward=ref,
        )

    async def task(self, **fields: Any) -> RecordRef:
        """A published task."""
        body = TaskPublished(task_id=f"task-{uuid.uuid4().hex[:8]}", instruction="mend it", **fields)
        return await self._append("tasks.v1", body.task_id, body)

    async def open(self, group: str, sessions: list[str]) -> int:
        """The group's opening; returns its offset on groups.v1."""
        opened = GroupOpened(
            group_id=group,
            lane=self.lane,
            ordinal=0,
            task=RecordRef("tasks.v1", 0, 0),
            task_id=group,
            task_digest="",
            purpose="rl",
            policy=self.policy,
            sessions=sessions,
            version=0,
            deadline_ms=0,
        )
        return (await self._append("groups.v1", self.lane, opened)).offset

    async def end(self, group: str, members: list[SealedMember]) -> int:
        """The group opened with these members and sealed; returns the offset of the seal."""
        await self.open(group, [member.session_id for member in members])
        return await self.seal(group, members)

    async def seal(self, group: str, members: list[SealedMember]) -> int:
        """The cut; returns its offset on groups.v1."""
        sealed = GroupSealed(group_id=group, lane=self.lane, reason="complete", members=members)
        return (await self._append("groups.v1", self.lane, sealed)).offset

    async def group(
        self,
        totals: Sequence[float] = (1.0, 0.0),
        *,
        version: int = 0,
        turns: Sequence[TurnSampled] | None = None,
        **session: Any,
    ) -> int:
        """A whole group; returns the offset of its seal."""
        name = f"{self.lane}.g{self.groups}"
        number, self.groups = self.groups, self.groups + 1
        members = []
        for attempt, total in enumerate(totals):
            said = turns or [turn(0, 0, [1, 2, 3], [4 + number % 50, 5 + attempt, 6, 7], [(0, version)])]
            written = await self.session(f"{name}.{attempt}", said, **session)
            members.append(await self.member(written, name, total))
        return await self.end(name, members)

    async def grant(self, subject: str) -> int:
        return (await self._append("subjects.v1", subject, ConsentGranted(subject=subject))).offset

    async def withdraw(self, subject: str) -> int:
        return (await self._append("subjects.v1", subject, ConsentWithdrawn(subject=subject))).offset

    # -- what the loops wrote ----------------------------------------------------------------------------------

    async def batches(self) -> list[tuple[RecordRef, BatchAssembled]]:
        """All committed batches, once everything written is stable."""
        await self.log.wait_stable("batches.v1", 0, await self.log.high_water("batches.v1", 0))
        return [row async for row in batches_of(self.log, self.lane)]

    async def steps(self) -> list[StepCompleted]:
        await self.log.wait_stable("batches.v1", 0, await self.log.high_water("batches.v1", 0))
        bodies = [record.event.body async for record in self.log.read("batches.v1", 0, 0)]
        return [b for b in bodies if isinstance(b, StepCompleted) and b.lane == self.lane]

    async def versions(self) -> list[VersionPublished]:
        await self.log.wait_stable("weights.v1", 0, await self.log.high_water("weights.v1", 0))
        bodies = [record.event.body async for record in self.log.read("weights.v1", 0, 0)]
        return [b for b in bodies if isinstance(b, VersionPublished) and b.policy == self.policy]

    async def written(self) -> int:
        """How many records of this lane batches.v1 holds, committed or not: proof that an aborted one was sent."""
        return len(await self.sent())

    async def sent(self) -> list[bytes]:
        """The values of those records."""
        reader = consumer(self.log.config, committed=False)
        await start(self.log.config, reader)
        try:
            place = partition(self.log.config, "batches.v1", 0)
            reader.assign([place])
            reader.seek(place, 0)
            end = (await reader.end_offsets([place]))[place]
            values: list[bytes] = []
            while await reader.position(place) < end:
                records = (await reader.getmany(place, timeout_ms=200)).get(place, [])
                values += [record.value for record in records if record.key == self.lane.encode()]
            return values
        finally:
            await stop(reader)


TURN_HEADERS: list[tuple[str, bytes | None]] = [
    ("ce_specversion", b"1.0"),
    ("ce_id", b"poison"),
    ("ce_type", b"turn.sampled.v1"),
    ("ce_source", b"test"),
    ("content-type", b"application/msgpack"),
]


async def until(task: asyncio.Task[None], done: Callable[[], Any]) -> None:
    """Wait for `done()` to be true while the loop runs; its own death ends the wait with its error."""
    await eventually(done, "what the loop is to do", PATIENCE_S, watched=task)


async def stopped(task: asyncio.Task[None]) -> None:
    """Cancel and wait for the end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
