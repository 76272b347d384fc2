"""Group consumers against a real broker: nothing skipped, nothing lost, partitions that stand still and say why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from support.waiting import eventually

from odradek.streams.clients import partition
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import Busy, GroupConsumer, Later, Retry, Start
from odradek.streams.dlq import DeadLetter, DeadLetters, Why
from odradek.streams.envelope import Record
from odradek.streams.errors import NoPosition, OffsetGap, StoreUnreachable, UnknownEventType
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardRevised
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.polling import Gap, GapPolicy
from odradek.streams.testing import an_event, fresh_config, key

__all__ = ["fresh_config", "key"]
pytestmark = pytest.mark.contract

FAST = Retry(attempts=3, first_s=0.05, factor=1.0)
SLOW = Retry(attempts=3, first_s=60.0)


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


def numbered(number: int) -> RewardRevised:
    return RewardRevised(
        session_id="s",
        group_id="g",
        grader="test",
        grader_version="1",
        components={},
        total=float(number),
        reason=str(number),
    )


async def publish(log: EventLog, key: str, numbers: range) -> None:
    await log.append_many("rewards.v1", [(key, an_event(numbered(number), key, number)) for number in numbers])


class Recorder:
    """A handler that notes what it was given and fails where told to."""

    def __init__(self, fails: Callable[[int], bool] = lambda _: False) -> None:
        self.handled: list[int] = []
        self.tried: list[int] = []
        self.fails = fails

    async def __call__(self, record: Record) -> None:
        number = int(record.event.body.reason)
        self.tried.append(number)
        if self.fails(number):
            raise ValueError(f"cannot handle {number}")
        self.handled.append(number)


@asynccontextmanager
async def running(consumer: GroupConsumer) -> AsyncIterator[GroupConsumer]:
    """The consumer at work; an error of its own fails the test. On leaving it is asked to stop and waited for."""
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        consumer.stop()
        await task


def member(log: EventLog, handler: Recorder, **options: object) -> GroupConsumer:
    return GroupConsumer(log, "graders", ["rewards.v1"], handler, **({"retry": FAST} | options))  # type: ignore[arg-type]


async def test_each_record_reaches_the_handler_in_order_and_a_restart_goes_on_behind_it(
    log: EventLog, key: str
) -> None:
    await publish(log, key, range(50))
    first = Recorder()
    async with running(member(log, first)):
        await eventually(lambda: len(first.handled) == 50, "50 records")
    await publish(log, key, range(50, 60))
    second = Recorder()
    async with running(member(log, second)):
        await eventually(lambda: len(second.handled) == 10, "10 records")
    assert (first.handled, second.handled) == (list(range(50)), list(range(50, 60)))


async def test_case_faust_189_a_record_whose_handler_raised_is_redelivered_after_a_restart(
    log: EventLog, key: str
) -> None:
    """faust-streaming/faust #189, #315: ten events, the fifth raises; restart without, then with repair."""
    await publish(log, key, range(1, 11))
    for tried in ([1, 2, 3, 4, 5], [5]):
        broken = Recorder(lambda number: number == 5)
        async with running(member(log, broken, retry=SLOW)):
            await eventually(lambda: 5 in broken.tried, "the fifth record")  # noqa: B023
        assert broken.tried == tried, "what was handled is not handled again"
    repaired = Recorder()
    async with running(member(log, repaired)):
        await eventually(lambda: 10 in repaired.handled, "the tenth record")
    assert repaired.handled == [5, 6, 7, 8, 9, 10]


async def test_case_faust_189_a_record_that_keeps_failing_is_in_the_queue_with_its_cause(
    log: EventLog, key: str
) -> None:
    await publish(log, key, range(1, 11))
    broken = Recorder(lambda number: number == 5)
    letters = DeadLetters(log)
    async with running(member(log, broken)):
        await eventually(lambda: broken.tried.count(5) == FAST.attempts, "all attempts")

        async def all_six() -> bool:
            return len(await letters.letters("graders")) >= 6

        await eventually(all_six, "six dead letters")
    assert broken.handled == [1, 2, 3, 4]
    found = await letters.letters("graders")
    assert [letter.why for letter in found] == [Why.HANDLER, *[Why.FOLLOWS] * 5]
    assert found[0].error == "ValueError: cannot handle 5"
    assert found[0].attempts == FAST.attempts

    repaired = Recorder()
    async with running(member(log, repaired)):
        await letters.release(found[0].offset)
        await eventually(lambda: 10 in repaired.handled, "the released records")
        await publish(log, key, range(11, 13))
        await eventually(lambda: 12 in repaired.handled, "records behind the release")
    assert repaired.handled == list(range(5, 13))
    assert await letters.letters("graders") == []


async def test_other_keys_go_on_while_one_is_held_back(log: EventLog, key: str) -> None:
    await publish(log, f"{key}-bad", range(1))
    await publish(log, f"{key}-good", range(1, 4))
    broken = Recorder(lambda number: number == 0)
    async with running(member(log, broken)):
        await eventually(lambda: {1, 2, 3} <= set(broken.handled), "records of the other key")
    assert broken.handled == [1, 2, 3]


async def test_later_records_of_a_key_go_on_where_the_consumer_says_so_and_a_release_comes_after_them(
    log: EventLog, key: str
) -> None:
    await publish(log, key, range(4))
    recorder = Recorder(lambda number: number == 1)
    consumer = GroupConsumer(log, "go-on", ["rewards.v1"], recorder, retry=FAST, later=Later.GO_ON)
    async with running(consumer):
        await eventually(lambda: recorder.handled == [0, 2, 3], "the later records")
        (letter,) = await DeadLetters(log).letters("go-on")
        assert letter.why == Why.HANDLER
        recorder.fails = lambda _: False
        await DeadLetters(log).release(letter.offset, "mended", "ann")
        await eventually(lambda: recorder.handled == [0, 2, 3, 1], "the released record")


async def test_a_released_letter_is_the_event_it_was_with_its_id_and_its_place(log: EventLog, key: str) -> None:
    await publish(log, key, range(1))
    seen: list[tuple[str, RecordRef]] = []
    broken = True

    async def handler(record: Record) -> None:
        seen.append((record.event.id, record.ref))
        if broken:
            raise ValueError("not yet")

    async with running(GroupConsumer(log, "ids", ["rewards.v1"], handler, retry=FAST)):
        letters: list[DeadLetter] = []

        async def put() -> bool:
            letters[:] = await DeadLetters(log).letters("ids")
            return bool(letters)

        await eventually(put, "a dead letter")
        broken = False
        await DeadLetters(log).release(letters[0].offset)
        await eventually(lambda: len(seen) == FAST.attempts + 1, "the released record")
    assert len(set(seen)) == 1, "every delivery was of one id and one place"
    assert sum((await log.stable_ends("rewards.v1")).values()) == 1, "the source topic got nothing"


@pytest.mark.parametrize("why", [Why.DECODE, Why.HANDLER])
async def test_whoever_waits_is_told_before_a_record_becomes_a_letter_until_it_worked(
    log: EventLog, key: str, why: Why
) -> None:
    if why is Why.DECODE:
        await log.append_raw("rewards.v1", key.encode(), b"\xc1", [("ce_type", b"reward.revised.v1")])
    else:
        await publish(log, key, range(1))
    told: list[tuple[RecordRef, Why]] = []

    async def on_dead(record: Record, why: Why, _error: str) -> None:
        told.append((record.ref, why))
        assert await DeadLetters(log).letters("told") == [], "first whoever waits, then the queue"
        if len(told) == 1:
            raise StoreUnreachable("not now")

    recorder = Recorder(lambda _: True)
    retry = Retry(attempts=2, first_s=0.05, factor=1.0, longest_s=0.05)
    async with running(GroupConsumer(log, "told", ["rewards.v1"], recorder, retry=retry, on_dead=on_dead)):

        async def put() -> bool:
            return len(await DeadLetters(log).letters("told")) == 1

        await eventually(put, "a dead letter")
    assert [reason for _, reason in told] == [why, why] and len({ref for ref, _ in told}) == 1


async def test_case_faststream_2458_a_record_that_does_not_decode_is_in_the_queue_at_once_with_its_bytes(
    log: EventLog, key: str
) -> None:
    headers = [("ce_type", b"reward.revised.v1"), ("x-odd", b"\xfe\x41\x80"), ("x-null", None)]
    bad = await log.append_raw("rewards.v1", key.encode(), b"\xc1 not msgpack", headers)
    await publish(log, f"{key}-good", range(3))
    recorder = Recorder()
    async with running(member(log, recorder)):
        await eventually(lambda: len(recorder.handled) == 3, "the good records")
        letters = DeadLetters(log)
        await eventually(letters.letters, "a dead letter")
    (letter,) = await letters.letters()
    assert (letter.why, letter.consumer, letter.origin) == (Why.DECODE, "graders", bad)
    assert (letter.key, letter.value, letter.headers) == (key.encode(), b"\xc1 not msgpack", tuple(headers))
    assert "reward.revised.v1" in letter.error


async def test_an_unknown_type_pauses_its_partition_with_an_alarm_and_nothing_is_lost(log: EventLog, key: str) -> None:
    await publish(log, key, range(2))
    odd = await log.append_raw("rewards.v1", key.encode(), b"\x80", [("ce_type", b"reward.imagined.v9")])
    await publish(log, key, range(2, 4))
    alarms = []
    recorder = Recorder()
    async with running(member(log, recorder, on_alarm=alarms.append)) as consumer:
        await eventually(lambda: bool(alarms), "the alarm")
        assert [pause.ref for pause in consumer.paused.values()] == [odd]
        assert "'reward.imagined.v9' is unknown to this build: upgrade readers" in alarms[0].reason
        assert consumer.fault.startswith(f"stands still at {odd}: ")
    assert recorder.handled == [0, 1]
    assert await DeadLetters(log).letters() == []


async def test_an_unknown_type_that_a_handler_meets_pauses_too(log: EventLog, key: str) -> None:
    """In what it reads beside its input: no retry and no dead letter makes this build know it."""
    await publish(log, key, range(1))
    alarms = []

    async def reads_elsewhere(_record: Record) -> None:
        raise UnknownEventType("event type 'session.imagined.v9' is unknown to this build")

    consumer = GroupConsumer(log, "graders", ["rewards.v1"], reads_elsewhere, retry=FAST, on_alarm=alarms.append)
    async with running(consumer):
        await eventually(lambda: bool(alarms), "the alarm")
    assert await DeadLetters(log).letters() == []


async def test_an_unknown_type_on_an_open_topic_is_a_dead_letter_and_stops_nobody(log: EventLog, key: str) -> None:
    """Any client may write there: a pause would let each of them stop everybody."""
    odd = await log.append_raw("feedback.v1", key.encode(), b"{}", [("ce_type", b"nonsense.v9")], partition=0)
    good = an_event(FeedbackGiven(session_id="s", verdict="accepted"))
    behind = await log.append("feedback.v1", f"{key}-good", good, partition=0)
    handled: list[RecordRef] = []

    async def take(record: Record) -> None:
        handled.append(record.ref)

    async with running(GroupConsumer(log, "graders", ["feedback.v1"], take, retry=FAST)):
        await eventually(lambda: bool(handled), "the record behind")
    assert handled == [behind]
    assert [(one.origin, one.why) for one in await DeadLetters(log).letters()] == [(odd, Why.DECODE)]


async def test_a_busy_handler_gets_the_same_record_again_and_it_does_not_count_as_a_failure(
    log: EventLog, key: str
) -> None:
    await publish(log, key, range(5))
    recorder = Recorder()
    refusals = 10

    async def busy_at_first(record: Record) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise Busy(0.01)
        await recorder(record)

    async with running(GroupConsumer(log, "graders", ["rewards.v1"], busy_at_first, retry=FAST)):
        await eventually(lambda: len(recorder.handled) == 5, "five records")
    assert recorder.handled == list(range(5))


async def test_an_outage_of_ours_never_puts_a_record_into_the_queue(log: EventLog, key: str) -> None:
    await publish(log, key, range(3))
    recorder = Recorder()
    outages, alarms = 3 * FAST.attempts, []

    async def store_is_away(record: Record) -> None:
        nonlocal outages
        if outages:
            outages -= 1
            raise StoreUnreachable("the store is away")
        await recorder(record)

    consumer = GroupConsumer(log, "graders", ["rewards.v1"], store_is_away, retry=FAST, on_alarm=alarms.append)
    async with running(consumer):
        await eventually(lambda: len(recorder.handled) == 3, "three records")
    assert recorder.handled == [0, 1, 2]
    assert await DeadLetters(log).letters(settled=True) == []
    assert ["the store is away" in alarm.reason for alarm in alarms] == [True]


async def test_partitions_change_hands_only_between_batches(log: EventLog, key: str) -> None:
    """Two members share a group while 400 records flow: each record is handled once, each key in order."""
    keys = [f"{key}-{number}" for number in range(16)]
    seen: list[tuple[str, int]] = []

    async def note(record: Record) -> None:
        await asyncio.sleep(0.002)
        seen.append((record.key or "", int(record.event.body.reason)))

    for session in keys:
        await publish(log, session, range(25))
    first = GroupConsumer(log, "graders", ["rewards.v1"], note)
    second = GroupConsumer(log, "graders", ["rewards.v1"], note)
    async with running(first):
        await eventually(lambda: len(seen) > 50, "the first member's work")
        async with running(second):
            await eventually(lambda: len(seen) >= 400, "all records")
    assert len(seen) == len(set(seen)) == 400
    for session in keys:
        assert [number for name, number in seen if name == session] == list(range(25))


async def test_records_fetched_while_partitions_change_hands_are_not_lost(
    log: EventLog, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch that began before a rebalance and ended after it: the position it moved is the new assignment's."""
    keys = [f"{key}-{number}" for number in range(12)]
    ones, others = Recorder(), Recorder()
    one, other = member(log, ones), member(log, others)
    poll, joined = one._poller.poll, asyncio.Event()

    async def straddling(*given: Any, **named: Any) -> list[Record]:
        if not joined.is_set():
            return await poll(*given, **named)
        before = one._generation
        await eventually(lambda: one._generation >= before + 2, "the rebalance")
        joined.clear()
        for number, name in enumerate(keys):
            await publish(log, name, range(number, number + 1))
        consumer, _, *rest = given
        return await poll(consumer, [tp for tp in consumer.assignment() if tp in one._ready], *rest, **named)

    monkeypatch.setattr(one._poller, "poll", straddling)
    async with running(one):
        await publish(log, key, range(100, 101))
        await eventually(lambda: ones.handled == [100], "the first member at work")
        joined.set()
        async with running(other):
            await eventually(lambda: set(range(12)) <= {*ones.handled, *others.handled}, "every record", 90)
            assert set(ones.handled) - {100} and others.handled, "both of them have partitions"


async def test_a_static_member_that_returns_gets_its_partitions_back(log: EventLog, key: str) -> None:
    for number in range(8):
        await publish(log, f"{key}-{number}", range(1))
    first, second = Recorder(), Recorder()
    async with running(member(log, first, instance="one")):
        await eventually(lambda: len(first.handled) == 8, "8 records")
    for number in range(8):
        await publish(log, f"{key}-{number}", range(1, 2))
    async with running(member(log, second, instance="one")):
        await eventually(lambda: len(second.handled) == 8, "8 more records")
    assert second.handled == [1] * 8


class TestGaps:
    """aio-libs/aiokafka #718, #261: commit offset 3, delete records below 20, restart the reader."""

    async def prepared(self, log: EventLog, key: str) -> int:
        await publish(log, key, range(3))
        recorder = Recorder()
        async with running(member(log, recorder)):
            await eventually(lambda: len(recorder.handled) == 3, "three records")
        await publish(log, key, range(3, 25))
        (number,) = [n for n, end in (await log.stable_ends("rewards.v1")).items() if end]
        client = AIOKafkaAdminClient(bootstrap_servers=log.config.bootstrap)
        await client.start()
        await client.delete_records({partition(log.config, "rewards.v1", number): RecordsToDelete(before_offset=20)})
        await client.close()
        return number

    async def test_case_aiokafka_718_the_reader_stops_with_a_typed_error(self, log: EventLog, key: str) -> None:
        number = await self.prepared(log, key)
        with pytest.raises(OffsetGap, match=rf"rewards\.v1/{number}: offsets 3\.\.19 are gone"):
            async with asyncio.timeout(30):
                await member(log, Recorder()).run()

    async def test_case_aiokafka_718_on_request_it_goes_on_and_records_the_gap(self, log: EventLog, key: str) -> None:
        number = await self.prepared(log, key)
        recorder = Recorder()
        async with running(member(log, recorder, gap=GapPolicy.RECORD)) as consumer:
            await eventually(lambda: len(recorder.handled) == 5, "records behind the gap")
        assert recorder.handled == [20, 21, 22, 23, 24]
        assert consumer.gaps == [Gap("rewards.v1", number, 3, 20)]


async def test_a_group_without_a_position_guesses_none(log: EventLog, key: str) -> None:
    await publish(log, key, range(3))
    with pytest.raises(NoPosition, match=r"graders has no committed offset for rewards\.v1"):
        async with asyncio.timeout(30):
            await member(log, Recorder(), start=Start.NONE).run()
