"""Dead letters: records that a consumer could not handle, kept whole, until a person releases or drops them.

A letter is the original record (key, bytes and headers untouched) with headers that say which consumer refused it,
where it came from and why. The queue is per consumer. While a key has open letters, its later records follow it here,
so that nobody ever sees them out of order; `release` gives all of a key's letters back to that one consumer, in order,
and never to the source topic, where other consumers have handled them already.

`DeadLetterFold` is pure and folds dlq.v1; `DeadLetters` reads, writes and releases.
"""

import time
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from odradek.streams.envelope import Event, Headers, Record, event_id
from odradek.streams.errors import Terminal
from odradek.streams.events.dlq import (
    DeadLetterDelivered,
    DeadLetterDropped,
    DeadLetterRefused,
    DeadLetterReleased,
)
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.log import EventLog

TOPIC = "dlq.v1"
PARTITION = 0
"""dlq.v1 has one partition: letters and what is done about them are in one order."""

PREFIX = "odradek_dlq_"
ERROR_CHARACTERS = 500
"""Characters of an error kept with a letter. Too few: the cause is cut off. Too many: content in headers."""


class Why(StrEnum):
    """Why a record is here."""

    DECODE = "decode"
    """Its bytes do not fit the type it claims."""
    HANDLER = "handler"
    """The consumer's handler failed on it as often as it may."""
    FOLLOWS = "follows"
    """An earlier record of its key is here."""


class State(StrEnum):
    """Where a letter stands."""

    DEAD = "dead"
    RELEASED = "released"
    DELIVERED = "delivered"
    DROPPED = "dropped"


Lane = tuple[str, bytes]
"""What is held back together: topic and key. A record without a key is a lane of its own."""


def lane_of(ref: RecordRef, key: bytes | None) -> Lane:
    """The lane of a record."""
    return ref.topic, key if key is not None else f"(no key) {ref}".encode()


class DeadLetter(msgspec.Struct):
    """One letter as folded."""

    offset: int
    """On dlq.v1; names the letter."""
    consumer: str
    origin: RecordRef
    key: bytes | None
    value: bytes | None
    headers: Headers
    """Of the original record."""
    why: str
    error: str
    attempts: int
    time_ms: int
    state: State = State.DEAD

    @property
    def lane(self) -> Lane:
        """What it is held back with."""
        return lane_of(self.origin, self.key)

    @property
    def open(self) -> bool:
        """Whether it still holds its lane back."""
        return self.state in (State.DEAD, State.RELEASED)

    def record(self) -> Record:
        """The original record, coordinates and all; what it encrypts still opens, for it is bound to those."""
        return Record(self.origin, self.key, self.value, self.headers, self.time_ms)


class DeadLetterFold:
    """Pure fold of dlq.v1: letters by offset, and which lanes are held back for whom."""

    def __init__(self) -> None:
        self.letters: dict[int, DeadLetter] = {}
        self.position = 0
        """The first offset of dlq.v1 that is not folded yet."""
        self._lanes: dict[tuple[str, Lane], list[int]] = {}
        self._released: set[tuple[str, Lane]] = set()

    def apply(self, record: Record) -> None:
        """Takes the next record of dlq.v1."""
        if record.ref.offset < self.position:
            return
        self.position = record.ref.offset + 1
        letter = letter_of(record)
        if letter is not None:
            place = (letter.consumer, letter.lane)
            if place in self._released:
                letter.state = State.RELEASED
            self.letters[letter.offset] = letter
            self._lanes.setdefault(place, []).append(letter.offset)
            return
        self._decide(record.event.body)

    def _decide(self, body: object) -> None:
        match body:
            case DeadLetterReleased(consumer=consumer, topic=topic, key=key):
                self._set_lane((consumer, (topic, key)), State.RELEASED)
            case DeadLetterDelivered(letter=offset):
                self._settle(offset, State.DELIVERED)
            case DeadLetterDropped(letter=offset):
                self._settle(offset, State.DROPPED)
            case DeadLetterRefused(letter=offset) if offset in self.letters:
                letter = self.letters[offset]
                self._set_lane((letter.consumer, letter.lane), State.DEAD)

    def _set_lane(self, place: tuple[str, Lane], state: State) -> None:
        for offset in self._lanes.get(place, ()):
            self.letters[offset].state = state
        if state is State.RELEASED and place in self._lanes:
            self._released.add(place)
        else:
            self._released.discard(place)

    def _settle(self, offset: int, state: State) -> None:
        letter = self.letters.get(offset)
        if letter is None or not letter.open:
            return
        letter.state = state
        place = (letter.consumer, letter.lane)
        self._lanes[place].remove(offset)
        if not self._lanes[place]:
            del self._lanes[place]
            self._released.discard(place)

    def holds_back(self, consumer: str, lane: Lane) -> bool:
        """Whether records of this lane go to the queue instead of the consumer's handler."""
        return (consumer, lane) in self._lanes

    def due(self, consumer: str) -> Iterator[DeadLetter]:
        """The next letter of each released lane of a consumer."""
        for place in sorted(self._released, key=lambda one: self._lanes[one][0]):
            if place[0] == consumer:
                yield self.letters[self._lanes[place][0]]


def letter_of(record: Record) -> DeadLetter | None:
    """The letter in a record of dlq.v1; None for an event about letters."""
    ours = {
        name.removeprefix(PREFIX): value.decode("utf-8", "replace")
        for name, value in record.headers
        if name.startswith(PREFIX) and value is not None
    }
    if "origin" not in ours:
        return None
    topic, _, place = ours["origin"].rpartition("/")
    number, _, offset = place.partition("@")
    return DeadLetter(
        offset=record.ref.offset,
        consumer=ours.get("consumer", ""),
        origin=RecordRef(topic=topic, partition=int(number), offset=int(offset)),
        key=record.key_bytes,
        value=None if ours.get("value") == "null" else record.value,
        headers=tuple((name, value) for name, value in record.headers if not name.startswith(PREFIX)),
        why=ours.get("why", ""),
        error=ours.get("error", ""),
        attempts=int(ours.get("attempts", "0")),
        time_ms=record.timestamp_ms,
    )


class DeadLetters:
    """Access to the queue for consumers and the CLI."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.fold = DeadLetterFold()

    async def catch_up(self) -> None:
        """Folds everything that is on dlq.v1 now."""
        end = await self._log.stable_end(TOPIC, PARTITION)
        if end > self.fold.position:
            async for record in self._log.read(TOPIC, PARTITION, self.fold.position, end):
                self.fold.apply(record)
            self.fold.position = max(self.fold.position, end)

    async def put(self, consumer: str, record: Record, why: Why, error: str, attempts: int) -> RecordRef:
        """Writes a letter and folds it; durable when this returns, so that the offset may be committed."""
        headers: Headers = (
            *record.headers,
            (f"{PREFIX}consumer", consumer.encode()),
            (f"{PREFIX}origin", str(record.ref).encode()),
            (f"{PREFIX}why", why.encode()),
            (f"{PREFIX}error", error[:ERROR_CHARACTERS].encode()),
            (f"{PREFIX}attempts", str(attempts).encode()),
        )
        value = record.value
        if value is None and record.key_bytes is None:  # the client library refuses to write such a record
            value, headers = b"", (*headers, (f"{PREFIX}value", b"null"))
        ref = await self._log.append_raw(TOPIC, record.key_bytes, value, headers, partition=PARTITION)
        await self.catch_up()
        return ref

    async def letters(self, consumer: str | None = None, *, settled: bool = False) -> list[DeadLetter]:
        """Letters in order; those that are delivered or dropped only on request."""
        await self.catch_up()
        return [
            letter
            for letter in self.fold.letters.values()
            if (consumer is None or letter.consumer == consumer) and (settled or letter.open)
        ]

    async def show(self, offset: int) -> DeadLetter:
        """One letter by its offset on dlq.v1."""
        await self.catch_up()
        if offset not in self.fold.letters:
            raise Terminal(f"no dead letter at {TOPIC}/{PARTITION}@{offset}; `dlq list` shows what there is")
        return self.fold.letters[offset]

    async def release(self, offset: int, reason: str = "") -> list[DeadLetter]:
        """Lets the letter's whole key go: it and every open letter of that key will be delivered, in order, to the
        consumer that refused them. Returns them."""
        letter = await self.show(offset)
        body = DeadLetterReleased(consumer=letter.consumer, topic=letter.lane[0], key=letter.lane[1], reason=reason)
        await self.decide(body, "release", offset, self.fold.position)
        return [one for one in self.fold.letters.values() if one.state is State.RELEASED and one.lane == letter.lane]

    async def drop(self, offset: int, reason: str = "") -> DeadLetter:
        """Gives one letter up. Its key flows again when no open letter is left."""
        letter = await self.show(offset)
        await self.decide(DeadLetterDropped(consumer=letter.consumer, letter=offset, reason=reason), "drop", offset)
        return self.fold.letters[offset]

    async def decide(
        self,
        body: DeadLetterReleased | DeadLetterDropped | DeadLetterDelivered | DeadLetterRefused,
        *step: str | int,
    ) -> None:
        """Writes what was done about a letter and folds it."""
        event = Event.of(
            body,
            id=event_id(TOPIC, body.consumer, *step),
            source=f"dlq/{body.consumer}",
            meta=Meta(time_ms=int(time.time() * 1000)),
        )
        await self._log.append(TOPIC, body.consumer, event, partition=PARTITION)
        await self.catch_up()
