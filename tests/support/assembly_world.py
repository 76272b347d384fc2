"""Sessions, rewards and sealed groups made by hand, for assembly tests."""

from __future__ import annotations

from odradek.streams.assembly.v1.select import GroupRecords
from odradek.streams.assembly.v1.sequence import Sequence, sequence_of
from odradek.streams.codec import f32, i32
from odradek.streams.events.groups import GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    EndReason,
    SessionCompleted,
    SessionOpened,
    TurnSampled,
    Usage,
    WeightSpan,
)
from odradek.streams.ownership import SessionRecord

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=4, max_staleness=2)


def turn(
    number: int, position: int, prompt: list[int], completion: list[int], spans: list[tuple[int, int]] | None = None
) -> TurnSampled:
    return TurnSampled(
        turn=number,
        position=position,
        prompt=i32(prompt),
        completion=i32(completion),
        logprobs=f32([-0.25 * (i + 1) for i in range(len(completion))]),
        spans=[WeightSpan(*span) for span in (spans or [(0, 0)])],
        numerics_id="test",
        finish_reason="stop",
    )


def records(
    session: str,
    turns: list[TurnSampled],
    *,
    origin: Origin = "rl",
    subject: str = "",
    reason: EndReason = "done",
    epoch: int = 0,
) -> list[SessionRecord]:
    """A session's records at offsets from `epoch` on."""
    out: list[SessionRecord] = [
        (epoch, f"{session}/open", Meta(origin=origin, subject=subject), SessionOpened(session_id=session, policy="p"))
    ]
    bodies = [*turns, SessionCompleted(reason=reason, first_offset=epoch, usage=Usage())]
    for seq, body in enumerate(bodies):
        meta = Meta(origin=origin, subject=subject, epoch=epoch, seq=seq)
        out.append((epoch + 1 + seq, f"{session}/{seq}", meta, body))
    return out


def sequence(session: str, version: int = 0, *, tokens: int = 6, origin: Origin = "rl", subject: str = "") -> Sequence:
    """One turn: two prompt tokens, the rest sampled under `version`."""
    sampled = [(hash(session) + i) % 100 for i in range(tokens - 2)]
    one = turn(0, 0, [1, 2], sampled, [(0, version)])
    return sequence_of(session, records(session, [one], origin=origin, subject=subject))


def group(
    name: str,
    totals: list[float],
    *,
    offset: int = 0,
    versions: list[int] | None = None,
    origin: Origin = "rl",
    subject: str = "",
    tokens: int = 6,
) -> GroupRecords:
    """A sealed group whose members got these rewards; `solved` is 1 where the total is positive."""
    ids = [f"{name}.{i}" for i in range(len(totals))]
    versions = versions or [0] * len(totals)
    rewards = {
        session: RewardAssigned(
            session_id=session,
            group_id=name,
            partition=0,
            first_offset=0,
            last_offset=9,
            grader="g",
            grader_version="1",
            components={"solved": float(total > 0)},
            total=total,
            sampled_tokens=tokens - 2,
        )
        for session, total in zip(ids, totals, strict=True)
    }
    members = [
        SealedMember(
            session_id=session,
            status="rewarded",
            partition=0,
            first_offset=0,
            last_offset=9,
            reward=RecordRef("rewards.v1", 0, i),
        )
        for i, session in enumerate(ids)
    ]
    return GroupRecords(
        offset=offset,
        sealed=GroupSealed(group_id=name, lane="main-0", reason="complete", members=members),
        rewards=rewards,
        sequences={
            session: sequence(session, version, origin=origin, subject=subject, tokens=tokens)
            for session, version in zip(ids, versions, strict=True)
        },
    )


def nobody(_subject: str) -> bool:
    return False
