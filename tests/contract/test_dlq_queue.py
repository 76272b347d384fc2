"""The dead-letter queue: letters whole, order kept, release to one consumer, drop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetters, State, Why
from odradek.streams.envelope import Record
from odradek.streams.errors import Terminal
from odradek.streams.events.dlq import DeadLetterDelivered, DeadLetterRefused
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


def record(offset: int, key: bytes | None = b"k", value: bytes | None = b"v") -> Record:
    ref = RecordRef(topic="rewards.v1", partition=1, offset=offset)
    return Record(ref, key, value, (("ce_type", b"x.v1"), ("odd", b"\xfe"), ("null", None)), 5)


async def test_a_letter_holds_the_original_record_whole(log: EventLog) -> None:
    for original in (record(7), record(8, key=None, value=None), record(9, key=b"\xfe\x41\x80")):
        ref = await DeadLetters(log).put("graders", original, Why.HANDLER, "boom", 3)
        letter = await DeadLetters(log).show(ref.offset)
        again = letter.record()
        assert (again.ref, again.key_bytes, again.value, again.headers) == (
            original.ref,
            original.key_bytes,
            original.value,
            original.headers,
        )
        assert (letter.consumer, letter.why, letter.error, letter.attempts) == ("graders", "handler", "boom", 3)


async def test_a_key_is_held_back_for_one_consumer_until_its_letters_are_settled(log: EventLog) -> None:
    letters = DeadLetters(log)
    first = await letters.put("graders", record(1), Why.HANDLER, "boom", 3)
    second = await letters.put("graders", record(2), Why.FOLLOWS, "", 0)
    lane = ("rewards.v1", b"k")
    assert letters.fold.holds_back("graders", lane)
    assert not letters.fold.holds_back("controller", lane)
    assert not letters.fold.holds_back("graders", ("rewards.v1", b"other"))
    await letters.drop(first.offset, "not worth it")
    assert letters.fold.holds_back("graders", lane)
    await letters.decide(DeadLetterDelivered(consumer="graders", letter=second.offset), "delivered")
    restarted = DeadLetters(log)
    await restarted.catch_up()
    assert not restarted.fold.holds_back("graders", lane)
    states = [letter.state for letter in await restarted.letters(settled=True)]
    assert states == [State.DROPPED, State.DELIVERED]
    assert await restarted.letters() == []


async def test_release_gives_a_whole_key_back_in_order_and_those_that_follow_too(log: EventLog) -> None:
    letters = DeadLetters(log)
    refs = [await letters.put("graders", record(n), Why.HANDLER, "boom", 3) for n in (1, 2)]
    await letters.put("graders", record(9, key=b"other"), Why.HANDLER, "boom", 3)
    released = await letters.release(refs[1].offset)
    assert [letter.offset for letter in released] == [ref.offset for ref in refs]
    late = await letters.put("graders", record(3), Why.FOLLOWS, "", 0)
    delivered = []
    while due := list(letters.fold.due("graders")):
        assert len(due) == 1
        delivered.append(due[0].offset)
        await letters.decide(DeadLetterDelivered(consumer="graders", letter=due[0].offset), due[0].offset)
    assert delivered == [refs[0].offset, refs[1].offset, late.offset]
    assert [letter.key for letter in await letters.letters()] == [b"other"]


async def test_a_letter_refused_again_holds_its_key_as_before(log: EventLog) -> None:
    letters = DeadLetters(log)
    ref = await letters.put("graders", record(1), Why.HANDLER, "boom", 3)
    await letters.release(ref.offset)
    await letters.decide(DeadLetterRefused(consumer="graders", letter=ref.offset, error="still"), "refused")
    assert list(letters.fold.due("graders")) == []
    assert [letter.state for letter in await letters.letters("graders")] == [State.DEAD]
    await letters.release(ref.offset)
    assert [letter.offset for letter in letters.fold.due("graders")] == [ref.offset]


async def test_a_record_without_a_key_holds_back_nothing_else(log: EventLog) -> None:
    letters = DeadLetters(log)
    await letters.put("graders", record(1, key=None), Why.DECODE, "bad", 0)
    assert not letters.fold.holds_back("graders", ("rewards.v1", b""))
    assert len(await letters.letters()) == 1


async def test_a_letter_that_is_not_there_is_named(log: EventLog) -> None:
    with pytest.raises(Terminal, match=r"dlq\.v1/0@12"):
        await DeadLetters(log).show(12)


async def test_who_decided_and_why_is_kept_and_a_settled_letter_is_not_decided_again(log: EventLog) -> None:
    letters = DeadLetters(log)
    first = await letters.put("graders", record(1), Why.HANDLER, "boom", 3)
    second = await letters.put("graders", record(2, key=b"other"), Why.HANDLER, "boom", 3)
    await letters.drop(first.offset, "not worth it", "ann")
    await letters.release(second.offset, "mended", "bob")
    restarted = DeadLetters(log)
    found = await restarted.letters(settled=True)
    assert [(one.state, one.decided_by, one.reason) for one in found] == [
        (State.DROPPED, "ann", "not worth it"),
        (State.RELEASED, "bob", "mended"),
    ]
    assert found[0].value == b"v", "nothing is ever taken out of the queue"
    for decide in (restarted.drop, restarted.release):
        with pytest.raises(Terminal, match="is dropped already"):
            await decide(first.offset)


async def test_a_release_is_for_the_consumer_that_refused_and_for_nobody_else(log: EventLog) -> None:
    letters = DeadLetters(log)
    mine = await letters.put("graders", record(1), Why.HANDLER, "boom", 3)
    theirs = await letters.put("controller", record(1), Why.HANDLER, "boom", 3)
    await letters.release(theirs.offset)
    assert [one.offset for one in await letters.release(mine.offset)] == [mine.offset]


async def test_what_strangers_write_to_the_queue_stops_nobody(log: EventLog) -> None:
    strange: list[list[tuple[str, bytes | None]]] = [
        [],
        [("ce_type", b"nonsense.v9")],
        [("odradek_dlq_origin", b"garbage")],
        [("odradek_dlq_origin", b"rewards.v1/x@y"), ("odradek_dlq_consumer", b"graders")],
        [("odradek_dlq_origin", b"rewards.v1/1@2"), ("odradek_dlq_attempts", b"-")],
        [("odradek_dlq_consumer", b"graders")],
    ]
    for headers in strange:
        await log.append_raw("dlq.v1", b"k", b"\xc1", headers, partition=0)
    ref = await DeadLetters(log).put("graders", record(7), Why.HANDLER, "boom", 3)
    assert [one.offset for one in await DeadLetters(log).letters()] == [ref.offset]


async def test_an_original_with_headers_of_our_names_keeps_them_and_fools_nobody(log: EventLog) -> None:
    """A foreign client may name its headers as it likes."""
    headers = (
        ("odradek_dlq_consumer", b"other"),
        ("odradek_dlq_origin", b"x/1@2"),
        ("odradek_dlq_value", b"null"),
        ("odradek_dlq_headers", b"0"),
    )
    original = Record(RecordRef(topic="tasks.v1", partition=1, offset=4), b"k", b"v", headers, 5)
    ref = await DeadLetters(log).put("controller", original, Why.DECODE, "bad", 0)
    letter = await DeadLetters(log).show(ref.offset)
    assert (letter.consumer, str(letter.origin)) == ("controller", "tasks.v1/1@4")
    assert (letter.record().headers, letter.record().value) == (headers, b"v")


async def test_a_consumer_keeps_its_own_open_letters_in_memory_and_remembers_what_it_has_put(log: EventLog) -> None:
    letters = DeadLetters(log, "graders")
    first = await letters.put("graders", record(1), Why.HANDLER, "boom", 3)
    await letters.put("controller", record(1), Why.HANDLER, "boom", 3)
    second = await letters.put("graders", record(2), Why.FOLLOWS, "", 0)
    assert list(letters.fold.letters) == [first.offset, second.offset]
    await DeadLetters(log).drop(first.offset, "junk", "ann")
    await letters.catch_up()
    assert list(letters.fold.letters) == [second.offset]
    assert letters.fold.holds_back("graders", ("rewards.v1", b"k"))
    assert letters.fold.origins == {("graders", record(1).ref), ("graders", record(2).ref)}
