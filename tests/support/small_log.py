"""A small real log, written through EventLog and batched by the real assembler: RL, evaluation, production, damage."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from odradek.streams.assembly.assembler import Assembler
from odradek.streams.codec import f32, i32
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupOpened, GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    MessageReceived,
    SessionCompleted,
    SessionFailed,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
    WeightSpan,
)
from odradek.streams.events.subjects import ConsentGranted
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import batches_of
from odradek.streams.replay.select import bodies
from support.waiting import eventually

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=4)
PROMPT, COMPLETION, RESULT, LAST = [1, 40, 41, 2], [60, 61, 62], [4, 70, 5, 2], [63, 3]
"""Token ids of every session: prompt, first turn, result, second turn."""
BATCH_S = 60.0
"""Seconds for the assembler to close the batch."""

Damage = Literal["none", "unfinished", "failed", "undecodable", "malformed"]


@dataclass(slots=True)
class SmallLog:
    """What was written."""

    log: EventLog
    sessions: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Session id to partition, first and last offset."""
    damage: dict[str, Damage] = field(default_factory=dict)
    """What is to be wrong with sessions of groups."""

    async def append(self, topic: str, key: str, body: Any, *cause: str | int, meta: Meta | None = None) -> RecordRef:
        """One event with an id of its own."""
        event = Event.of(body, id=event_id("small", topic, *cause), source="test", meta=meta)
        return await self.log.append(topic, key, event)

    async def session(
        self,
        session_id: str,
        *,
        group: str = "",
        version: int = 0,
        origin: Origin = "rl",
        subject: str = "",
        damage: Damage = "none",
        task: RecordRef | None = None,
    ) -> None:
        """Two turns with one call between them, written by one owner."""
        whose = {"origin": origin, "subject": subject}
        opened = SessionOpened(session_id=session_id, policy="demo", group_id=group, task=task)
        first = await self.append("sessions.v1", session_id, opened, session_id, meta=Meta(**whose))  # type: ignore[arg-type]
        epoch = first.offset
        message = MessageReceived(message_id=f"{session_id}/m", text=f"mend {session_id}\n\tplease")
        await self.append("sessions.v1", session_id, message, session_id, "m", meta=Meta(**whose))  # type: ignore[arg-type]
        last = first
        for seq, body in enumerate(self._turns(session_id, epoch, version, group, damage)):
            meta = Meta(**whose, epoch=epoch, seq=seq)  # type: ignore[arg-type]
            last = await self.append("sessions.v1", session_id, body, session_id, seq, meta=meta)
            if damage == "undecodable" and seq == 1:
                headers = [("ce_type", b"turn.sampled.v1")]
                await self.log.append_raw("sessions.v1", session_id.encode(), b"\xc1garbage", headers)
        self.sessions[session_id] = (first.partition, first.offset, last.offset)

    @staticmethod
    def _turns(session_id: str, epoch: int, version: int, group: str, damage: Damage) -> list[Any]:
        completion = i32(COMPLETION) if damage != "malformed" else b"\x01\x02\x03"
        call = {"call_id": f"{session_id}/c", "turn": 0, "index": 0}
        ends: dict[Damage, list[Any]] = {
            "unfinished": [],
            "failed": [SessionFailed(cause="host gone", first_offset=epoch, group_id=group)],
        }
        end = [SessionCompleted(reason="done", first_offset=epoch, usage=Usage(turns=2), group_id=group)]
        return [
            _turn(0, 0, i32(PROMPT), completion, [-0.5, -1.25, -0.1], version),
            ToolRequested(**call, name="read_file", arguments={"path": "a.py"}, effect="pure"),  # type: ignore[arg-type]
            ToolCompleted(**call, text="1\tdef a():\n"),  # type: ignore[arg-type]
            _turn(1, 7, i32(RESULT), i32(LAST), [-0.25, -0.75], version + 1),
            *ends.get(damage, end),
        ]

    async def group(
        self,
        group: str,
        totals: Sequence[float],
        *,
        purpose: Literal["rl", "eval"] = "rl",
        version: int = 0,
        labels: dict[str, str] | None = None,
    ) -> None:
        """A task, its group, its finished sessions, their rewards and the seal."""
        lane = LANE.lane if purpose == "rl" else "eval-1"
        ids = [f"{group}.{attempt}" for attempt in range(len(totals))]
        task = TaskPublished(task_id=f"task-{group}", instruction="mend it", purpose=purpose)
        at = await self.append("tasks.v1", task.task_id, task, group)
        opened = GroupOpened(
            group_id=group,
            lane=lane,
            ordinal=0,
            task=at,
            task_id=task.task_id,
            task_digest=group,
            purpose=purpose,
            policy="demo",
            sessions=ids,
            version=version,
            deadline_ms=2**60,
            labels=labels or {},
        )
        await self.append("groups.v1", lane, opened, group, "opened")
        members = []
        for session_id, total in zip(ids, totals, strict=True):
            await self.session(
                session_id,
                group=group,
                version=version,
                origin=purpose,
                task=at,
                damage=self.damage.get(session_id, "none"),
            )
            members.append(await self._rewarded(session_id, group, total, purpose, version))
        sealed = GroupSealed(group_id=group, lane=lane, reason="complete", members=members)
        await self.append("groups.v1", lane, sealed, group, "sealed")

    async def _rewarded(
        self, session_id: str, group: str, total: float, origin: Literal["rl", "eval"], version: int
    ) -> SealedMember:
        partition, first, last = self.sessions[session_id]
        reward = RewardAssigned(
            session_id=session_id,
            group_id=group,
            partition=partition,
            first_offset=first,
            last_offset=last,
            grader="hidden-tests",
            grader_version="1",
            components={"solved": float(total > 0), "turns": 2.0, "errors": 0.0},
            total=total,
            tests_passed=["t[1]"],
            sampled_tokens=5,
            oldest_version=version,
            newest_version=version + 1,
        )
        ref = await self.append("rewards.v1", session_id, reward, session_id, meta=Meta(origin=origin))
        return SealedMember(
            session_id=session_id,
            status="rewarded",
            partition=partition,
            first_offset=first,
            last_offset=last,
            reward=ref,
        )

    async def batches(self, count: int) -> list[BatchAssembled]:
        """What the real assembler makes of the sealed groups."""

        async def enough() -> list[BatchAssembled] | None:
            found = [body async for body in bodies(self.log, "batches.v1") if isinstance(body, BatchAssembled)]
            return found if len(found) >= count else None

        running = asyncio.create_task(Assembler(self.log, LANE.lane).run())
        try:
            found = await eventually(enough, f"{count} batches", BATCH_S, watched=running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        assert found is not None and len(found) == count
        return found

    async def trained(self, batch: BatchAssembled, offset: int) -> None:
        """The step that consumed a batch, and its version."""
        number = batch.ordinal + 1
        step = StepCompleted(
            lane=LANE.lane,
            policy="demo",
            step=number,
            batch_id=batch.batch_id,
            batch_offset=offset,
            manifest_key=f"0/demo/main-0/{number}",
            manifest_sha256="0" * 64,
            metrics={"loss": 0.5},
        )
        await self.append("batches.v1", LANE.lane, step, "step", number)
        await self.published(number, batch.batch_id)

    async def published(self, version: int, batch_id: str = "") -> None:
        """A weight version."""
        body = VersionPublished(
            policy="demo",
            version=version,
            manifest_key=f"0/demo/main-0/{version}",
            manifest_sha256="0" * 64,
            lane=LANE.lane,
            step=version,
            batch_id=batch_id,
            parent=version - 1 if version else None,
        )
        await self.append("weights.v1", "demo", body, version)


def _turn(
    number: int, position: int, prompt: bytes, completion: bytes, logprobs: list[float], version: int
) -> TurnSampled:
    return TurnSampled(
        turn=number,
        position=position,
        prompt=prompt,
        completion=completion,
        logprobs=f32(logprobs),
        spans=[WeightSpan(0, version)],
        numerics_id="test",
        finish_reason="stop",
    )


async def write_small_log(log: EventLog) -> SmallLog:
    """Three kept groups and a flat one on the RL lane (one batch of two), an evaluation, production, and damage."""
    made = SmallLog(log)
    await made.published(0)
    await made.append("groups.v1", LANE.lane, LANE, "lane")
    await made.group("a", [1.0, 0.0], labels={"set": "train"})
    await made.group("flat", [0.0, 0.0])
    await made.group("b", [0.5, 0.0], version=1)
    await made.group("c", [0.0, 0.75], version=2)
    await made.group("e", [1.0], purpose="eval", labels={"set": "new"})
    await made.append("subjects.v1", "ann", ConsentGranted(subject="ann"), "ann")
    await made.session("p-ann", origin="production", subject="ann")
    await made.session("p-bob", origin="production", subject="bob")
    for damage in ("unfinished", "failed", "undecodable", "malformed"):
        await made.session(damage, damage=damage)
    (batch,) = await made.batches(1)
    found = await offset_of(log, batch)
    await made.trained(batch, found)
    return made


async def offset_of(log: EventLog, batch: BatchAssembled) -> int:
    """Where a batch lies on batches.v1."""
    async for ref, one in batches_of(log, batch.lane):
        if one.batch_id == batch.batch_id:
            return ref.offset
    raise AssertionError(f"{batch.batch_id} is not on the log")
