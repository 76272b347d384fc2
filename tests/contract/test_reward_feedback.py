"""People's answers as rewards (actors/reward/feedback.py), by the real consumer on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.waiting import eventually

from odradek.actors.reward import combine
from odradek.actors.reward.feedback import GRADER, GROUP, FeedbackRewards
from odradek.infra.serve.answers import give_feedback
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import GroupConsumer, Retry
from odradek.streams.dlq import DeadLetters
from odradek.streams.envelope import Event, Record
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardRevised
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, ToolCompleted, Usage
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


async def session(
    log: EventLog, name: str, *, origin: Origin = "production", tenant: str = "default", ended: bool = True
) -> tuple[RecordRef, RecordRef]:
    """A session with one failed call; returns where its first and last records lie."""
    whose: dict[str, Any] = {"origin": origin, "tenant": tenant, "subject": "ann"}
    opened = SessionOpened(session_id=name, policy="p", group_id="" if origin == "production" else "g")
    first = await log.append("sessions.v1", name, an_event(opened, meta=Meta(**whose)))
    bodies: list[Any] = [ToolCompleted(call_id="c", turn=0, index=0, text="no", is_error=True)]
    bodies += [SessionCompleted(reason="done", first_offset=first.offset, usage=Usage())] if ended else []
    last = first
    for seq, body in enumerate(bodies):
        meta = Meta(**whose, epoch=first.offset, seq=seq)
        last = await log.append("sessions.v1", name, an_event(body, meta=meta))
    return first, last


@asynccontextmanager
async def listening(log: EventLog, topics: tuple[str, ...] = ("feedback.v1",)) -> AsyncIterator[FeedbackRewards]:
    rewards = FeedbackRewards(log, "reward-0")
    retry = Retry(attempts=1)
    consumer = GroupConsumer(log, GROUP, topics, rewards.on_record, retry=retry)
    task = asyncio.create_task(consumer.run())
    try:
        yield rewards
    finally:
        consumer.stop()
        await task


async def given(log: EventLog) -> list[Event[Any]]:
    """Every reward, session by session in order."""
    found = [r for n in await log.partitions("rewards.v1") async for r in log.read("rewards.v1", n, 0)]
    return [record.event for record in found]


async def until_given(log: EventLog, count: int) -> list[Event[Any]]:
    async def enough() -> bool:
        return len(await given(log)) >= count

    await eventually(enough, f"{count} rewards")
    return await given(log)


async def test_the_first_answer_assigns_a_reward_and_a_later_one_revises_it(log: EventLog) -> None:
    first, last = await session(log, "p")
    async with listening(log):
        await give_feedback(log, "p", "ann", "accepted", comment="my secret words")
        (assigned,) = await until_given(log, 1)
        await log.append("feedback.v1", "p", an_event(FeedbackGiven(session_id="p", verdict="reverted")))
        assigned, revised = await until_given(log, 2)
    body = assigned.body
    assert isinstance(body, RewardAssigned) and (body.grader, body.group_id) == (GRADER, "")
    assert (body.partition, body.first_offset, body.last_offset) == (first.partition, first.offset, last.offset)
    assert body.components == {"feedback": 1.0, "turns": 0.0, "errors": 1.0}
    assert body.total == pytest.approx(1.0 - combine.ERROR_COST)
    assert (assigned.meta.origin, assigned.meta.subject) == ("production", "ann")
    assert isinstance(revised.body, RewardRevised) and revised.body.reason == "reverted"
    assert revised.body.components["feedback"] == 0.0
    assert all(b"secret words" not in (record.value or b"") for record in [r async for r in _rewards(log)])


async def _rewards(log: EventLog) -> AsyncIterator[Record]:
    for number in await log.partitions("rewards.v1"):
        async for record in log.read("rewards.v1", number, 0):
            yield record


async def test_an_answer_that_comes_again_behind_a_later_one_changes_nothing(log: EventLog) -> None:
    """At least once: a crash before the commit delivers both again, the older one first."""
    await session(log, "p")
    for verdict in ("accepted", "reverted", "reverted"):
        await log.append("feedback.v1", "p", an_event(FeedbackGiven(session_id="p", verdict=verdict)))
    rewards = FeedbackRewards(log, "reward-0")
    records = [record for n in range(3) async for record in log.read("feedback.v1", n, 0)]
    for record in [*records, *records]:
        await rewards.on_record(record)
    assert [type(event.body).__name__ for event in await given(log)] == ["RewardAssigned", "RewardRevised"]
    assert (await given(log))[-1].body.components["feedback"] == 0.0


@pytest.mark.parametrize("verdict", ["accepted", "rejected", "reverted", "followed_up"])
def test_every_answer_has_a_declared_worth(verdict: str) -> None:
    assert 0.0 <= combine.FEEDBACK[verdict] <= 1.0
    assert combine.FEEDBACK["accepted"] > combine.FEEDBACK["followed_up"] > combine.FEEDBACK["reverted"]


async def test_feedback_that_cannot_be_used_is_a_dead_letter_and_the_next_answer_counts(log: EventLog) -> None:
    await ensure_topics(log.config, ["acme"])
    await session(log, "good")
    await session(log, "rollout", origin="rl")
    await session(log, "open", ended=False)
    await session(log, "theirs", tenant="acme")
    reasons = {
        "rollout": "is rl: its grader speaks for it",
        "open": "has not ended",
        "nobody": "has not ended, or is not known",
        "theirs": "is not of tenant 'default'",
    }
    async with listening(log, ("feedback.v1", "feedback.v1.acme")):
        await log.append_raw("feedback.v1", b"k", b"\xc1", [("ce_type", b"feedback.given.v1")])
        await log.append_raw(
            "feedback.v1",
            b"j",
            b'{"body":{"session_id":"good","verdict":"superb"}}',
            [("ce_type", b"feedback.given.v1")],
        )
        for name in reasons:
            await log.append("feedback.v1", name, an_event(FeedbackGiven(session_id=name, verdict="accepted")))
        await log.append("feedback.v1.acme", "theirs", an_event(FeedbackGiven(session_id="theirs", verdict="rejected")))
        await log.append_raw(
            "feedback.v1",
            b"good",
            b'{"body":{"session_id":"good","verdict":"accepted"}}',
            [("ce_type", b"feedback.given.v1")],
        )
        rewards = await until_given(log, 2)

        async def all_set_aside() -> bool:
            return len(await DeadLetters(log).letters(GROUP)) == len(reasons) + 2

        await eventually(all_set_aside, "the dead letters")
    letters = {letter.key: letter for letter in await DeadLetters(log).letters(GROUP)}
    assert sorted(event.body.session_id for event in rewards) == ["good", "theirs"]
    for name, reason in reasons.items():
        assert reason in letters[name.encode()].error
    assert letters[b"k"].why == letters[b"j"].why == "decode"
