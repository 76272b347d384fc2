"""Dead letters: records that a consumer could not handle, kept whole, until a person releases or drops them.

A letter is the original record (key, bytes and headers untouched) with headers that say which consumer refused it,
where it came from and why. The queue is per consumer. While a key has open letters, its later records follow it here,
so that nobody ever sees them out of order; `release` gives all of a key's letters back to that one consumer, in order,
and never to the source topic, where other consumers have handled them already. A consumer may choose to let later
records of a key go on instead (`consumers.Later`); a release then delivers a letter after them.

What a person decides is a record of the queue with who and why: nothing is ever taken out of it. What strangers write
to dlq.v1 and what is no letter changes nothing.

`DeadLetterFold` is pure and folds dlq.v1; `DeadLetters` reads, writes and releases.
"""

import logging
import time
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from odradek.streams.envelope import Event, Headers, Record, event_id
from odradek.streams.errors import Terminal, UndecodableRecord
from odradek.streams.events.dlq import (
    DeadLetterDelivered,
    DeadLetterDropped,
    DeadLetterRefused,
    DeadLetterReleased,
)
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.log import EventLog

logger = logging.getLogger(__name__)

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
    decided_by: str = ""
    """Who released or dropped it, and why; the last one counts."""
    reason: str = ""

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

    def __init__(self, only: str | None = None) -> None:
        """`only`: keep the open letters of this consumer and nothing else, for a process that lives long."""
        self.letters: dict[int, DeadLetter] = {}
        self.position = 0
        """The first offset of dlq.v1 that is not folded yet."""
        self.origins: set[tuple[str, RecordRef]] = set()
        """Consumer and origin of every letter kept, settled ones included: what need not be put again."""
        self._only = only
        self._lanes: dict[tuple[str, Lane], list[int]] = {}
        self._released: set[tuple[str, Lane]] = set()

    def apply(self, record: Record) -> None:
        """Takes the next record of dlq.v1."""
        if record.ref.offset < self.position:
            return
        self.position = record.ref.offset + 1
        if any(name.startswith(PREFIX) for name, _ in record.headers):
            letter = letter_of(record)
            if letter is None:
                logger.warning("%s holds no letter: its headers are not ours", record.ref)
            elif self._only in (None, letter.consumer):
                self._keep(letter)
            return
        try:
            body = record.event.body
        except UndecodableRecord as error:
            logger.warning("dead letters: record passed over: %s", error)
            return
        self._decide(body)

    def _keep(self, letter: DeadLetter) -> None:
        place = (letter.consumer, letter.lane)
        if place in self._released:
            letter.state = State.RELEASED
        self.letters[letter.offset] = letter
        self.origins.add((letter.consumer, letter.origin))
        self._lanes.setdefault(place, []).append(letter.offset)

    def _decide(self, body: object) -> None:
        match body:
            case DeadLetterReleased(consumer=consumer, topic=topic, key=key):
                place = (consumer, (topic, key))
                for offset in self._lanes.get(place, ()):
                    self.letters[offset].decided_by, self.letters[offset].reason = body.by, body.reason
                self._set_lane(place, State.RELEASED)
            case DeadLetterDelivered(letter=offset):
                self._settle(offset, State.DELIVERED)
            case DeadLetterDropped(letter=offset):
                if offset in self.letters and self.letters[offset].open:
                    self.letters[offset].decided_by, self.letters[offset].reason = body.by, body.reason
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
        if self._only is not None:
            del self.letters[offset]

    def holds_back(self, consumer: str, lane: Lane) -> bool:
        """Whether records of this lane go to the queue instead of the consumer's handler."""
        return (consumer, lane) in self._lanes

    def due(self, consumer: str) -> Iterator[DeadLetter]:
        """The next letter of each released lane of a consumer."""
        for place in sorted(self._released, key=lambda one: self._lanes[one][0]):
            if place[0] == consumer:
                yield self.letters[self._lanes[place][0]]


def letter_of(record: Record) -> DeadLetter | None:
    """The letter in a record of dlq.v1; None where its headers are not those of one. They stand last, so that an
    original that brought headers of such names along keeps them, and fools nobody."""
    ours = {
        name.removeprefix(PREFIX): value.decode("utf-8", "replace")
        for name, value in record.headers
        if name.startswith(PREFIX) and value is not None
    }
    topic, _, place = ours.get("origin", "").rpartition("/")
    number, _, offset = place.partition("@")
    attempts, count = ours.get("attempts", "0"), ours.get("headers")
    if not (topic and number.isdecimal() and offset.isdecimal() and attempts.isdecimal()):
        return None
    whole = count is not None and count.isdecimal() and int(count) <= len(record.headers)
    return DeadLetter(
        offset=record.ref.offset,
        consumer=ours.get("consumer", ""),
        origin=RecordRef(topic=topic, partition=int(number), offset=int(offset)),
        key=record.key_bytes,
        value=None if ours.get("value") == "null" else record.value,
        headers=record.headers[: int(count)] if whole and count is not None else _without_ours(record.headers),
        why=ours.get("why", ""),
        error=ours.get("error", ""),
        attempts=int(attempts),
        time_ms=record.timestamp_ms,
    )


def _without_ours(headers: Headers) -> Headers:
    """The original's headers in a letter of a release that did not count them."""
    return tuple((name, value) for name, value in headers if not name.startswith(PREFIX))


class DeadLetters:
    """Access to the queue for consumers and the CLI."""

    def __init__(self, log: EventLog, only: str | None = None) -> None:
        """`only`: as for the fold."""
        self._log = log
        self.fold = DeadLetterFold(only)

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
            (f"{PREFIX}headers", str(len(record.headers)).encode()),
            (f"{PREFIX}consumer", consumer.encode()),
            (f"{PREFIX}origin", str(record.ref).encode()),
            (f"{PREFIX}why", why.encode()),
            (f"{PREFIX}error", error[:ERROR_CHARACTERS].encode()),
            (f"{PREFIX}attempts", str(attempts).encode()),
        )
        value = record.value
        if value is None and record.key_bytes is None:  # the client library refuses to write such a record
            value = b""
        headers = (*headers, (f"{PREFIX}value", b"null" if record.value is None else b"bytes"))
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

    async def _open(self, offset: int) -> DeadLetter:
        """One that can still be decided; a decision on another would only look as if something happened."""
        letter = await self.show(offset)
        if not letter.open:
            raise Terminal(f"dead letter {offset} is {letter.state.value} already")
        return letter

    async def release(self, offset: int, reason: str = "", by: str = "") -> list[DeadLetter]:
        """Lets the letter's whole key go: it and every open letter of that key will be delivered, in order, to the
        consumer that refused them. Returns them; twice is once. Raises Terminal for a letter that is settled."""
        letter = await self._open(offset)
        topic, key = letter.lane
        if letter.state is not State.RELEASED:
            body = DeadLetterReleased(consumer=letter.consumer, topic=topic, key=key, reason=reason, by=by)
            await self.decide(body, "release", offset, self.fold.position)
        return [
            one
            for one in self.fold.letters.values()
            if one.state is State.RELEASED and (one.consumer, one.lane) == (letter.consumer, letter.lane)
        ]

    async def drop(self, offset: int, reason: str = "", by: str = "") -> DeadLetter:
        """Gives one letter up. Its key flows again when no open letter is left. Raises Terminal for a letter that is
        settled."""
        letter = await self._open(offset)
        body = DeadLetterDropped(consumer=letter.consumer, letter=offset, reason=reason, by=by)
        await self.decide(body, "drop", offset)
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
