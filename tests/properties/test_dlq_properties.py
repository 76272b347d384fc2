"""The dead-letter fold as a protocol: whatever people and consumers do, keys keep their order and nothing is stuck."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from odradek.streams.dlq import PREFIX, DeadLetterFold, State
from odradek.streams.envelope import Record, encode
from odradek.streams.events.dlq import (
    DeadLetterDelivered,
    DeadLetterDropped,
    DeadLetterRefused,
    DeadLetterReleased,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.testing import an_event

CONSUMERS = st.sampled_from(["graders", "controller"])
KEYS = st.sampled_from([b"a", b"b"])
LETTERS = st.integers(0, 30)


class Queue(RuleBasedStateMachine):
    """Random letters and decisions, in one order, as dlq.v1 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.fold = DeadLetterFold()
        self.delivered: dict[tuple[str, bytes], list[int]] = {}
        self.log: list[Record] = []

    def write(self, value: bytes, headers: tuple[tuple[str, bytes | None], ...], key: bytes) -> None:
        record = Record(RecordRef(topic="dlq.v1", partition=0, offset=len(self.log)), key, value, headers, 0)
        self.log.append(record)
        self.fold.apply(record)

    def decide(self, body: object) -> None:
        value, headers = encode(an_event(body))
        self.write(value, headers, b"")

    @rule(consumer=CONSUMERS, key=KEYS)
    def put(self, consumer: str, key: bytes) -> None:
        origin = f"rewards.v1/0@{len(self.log)}".encode()
        self.write(b"v", ((f"{PREFIX}consumer", consumer.encode()), (f"{PREFIX}origin", origin)), key)

    @rule(consumer=CONSUMERS, key=KEYS)
    def release(self, consumer: str, key: bytes) -> None:
        self.decide(DeadLetterReleased(consumer=consumer, topic="rewards.v1", key=key))

    @rule(consumer=CONSUMERS, works=st.booleans())
    def deliver_what_is_due(self, consumer: str, works: bool) -> None:
        for letter in list(self.fold.due(consumer)):
            if works:
                self.delivered.setdefault((consumer, letter.key or b""), []).append(letter.offset)
                self.decide(DeadLetterDelivered(consumer=consumer, letter=letter.offset))
            else:
                self.decide(DeadLetterRefused(consumer=consumer, letter=letter.offset, error="no"))

    @rule(letter=LETTERS)
    def drop(self, letter: int) -> None:
        self.decide(DeadLetterDropped(consumer="any", letter=letter))

    @invariant()
    def letters_of_a_key_are_delivered_in_order_and_once(self) -> None:
        for offsets in self.delivered.values():
            assert offsets == sorted(set(offsets))

    @invariant()
    def a_key_is_held_back_exactly_while_it_has_open_letters(self) -> None:
        for consumer in ("graders", "controller"):
            for key in (b"a", b"b"):
                lane = ("rewards.v1", key)
                waiting = [x for x in self.fold.letters.values() if (x.consumer, x.lane) == (consumer, lane) and x.open]
                assert self.fold.holds_back(consumer, lane) == bool(waiting)
                assert len({letter.state for letter in waiting}) <= 1

    @invariant()
    def a_released_key_has_its_oldest_letter_due(self) -> None:
        for consumer in ("graders", "controller"):
            due = {letter.lane: letter.offset for letter in self.fold.due(consumer)}
            for letter in self.fold.letters.values():
                if letter.consumer == consumer and letter.state is State.RELEASED:
                    assert due[letter.lane] <= letter.offset

    @invariant()
    def folding_again_from_the_start_gives_the_same(self) -> None:
        again = DeadLetterFold()
        for record in [*self.log, *self.log]:
            again.apply(record)
        assert again.letters == self.fold.letters
        assert [x.offset for x in again.due("graders")] == [x.offset for x in self.fold.due("graders")]


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
