"""GroupConsumer: every partition's records to a handler, in order, none skipped, none lost.

For each partition: consumes from the group's committed offset; waits for records, for retries that are due and for
releases from the dead-letter queue; commits an offset only when everything before it is handled or in the queue.
 - Delivery is at least once; the handler makes its effects idempotent by event id.
 - One lock is held from fetch to commit and taken in on_partitions_revoked, so that a partition changes hands only
   between batches.
 - A decode error goes to the queue at once; a handler error after retries with backoff, during which only that
   partition is paused; later records of a held-back key follow it there (`dlq.py`), or go on (`Later`).
 - `on_dead` tells of a record before it becomes a letter, so that whoever waits for what it should have led to learns
   at once; until it succeeds the record is not given up.
 - A `Retryable` error from the handler (broker or store away) is ours, not the record's: it is tried for as long as it
   takes, with an alarm, and never goes to the queue.
 - An unknown event type is not poison: the partition pauses with an alarm until a reader that knows it is started, also
   where the handler meets it elsewhere. On a topic open to any client it is a dead letter: each could stop everybody.
 - A handler that cannot take more raises `Busy`: the partition pauses and the record comes again (backpressure).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import StrEnum

import msgspec
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka

from odradek.streams import clients
from odradek.streams.dlq import DeadLetter, DeadLetters, Why, lane_of
from odradek.streams.envelope import Record, subject_of
from odradek.streams.errors import (
    DecodeError,
    NoPosition,
    Retryable,
    StreamError,
    UndecodableRecord,
    UnknownEventType,
)
from odradek.streams.events.dlq import DeadLetterDelivered, DeadLetterRefused
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.polling import Gap, GapPolicy, Poller
from odradek.streams.topics import declared

logger = logging.getLogger(__name__)

SESSION_MS = 10_000
"""Milliseconds without a heartbeat after which the group gives a member's partitions away. Too low: a long garbage
collection moves them. Too high: a killed static member's partitions stand still."""

REBALANCE_MS = 60_000
"""Milliseconds that members have to finish their batch when partitions move; BATCH_S has to fit, handler included."""

BATCH_RECORDS = 200
"""Records taken from the client at one time. Too few: many commits. Too many: more to repeat after a crash."""

BATCH_S = 20.0
"""Seconds after which a batch stops at the record it has reached and commits. Too high: partitions cannot move."""

HANDLER_S = 30.0
"""Seconds one record may take unless the consumer says otherwise; then it counts as failed. Too low: honest work fails.
Too high: partitions move late. BATCH_S and a handler together stay below aiokafka's max_poll_interval_ms (300 s)."""

RELEASE_CHECK_S = 0.5
"""Seconds between looks at the dead-letter queue for releases. Too low: requests. Too high: a release seems ignored."""

Handler = Callable[[Record], Awaitable[None]]
"""Handles one record (`record.event` is decoded). Raising means failure; it is called again for the same record."""


class Retry(msgspec.Struct, frozen=True):
    """How often, and how far apart, a failing record is tried."""

    attempts: int = 5
    """Calls before the record goes to the queue. Too low: a short outage fills it. Too high: the partition waits."""
    first_s: float = 0.2
    factor: float = 3.0
    longest_s: float = 10.0

    def wait_s(self, attempt: int) -> float:
        """Seconds after the given (first = 1) failed attempt."""
        return min(self.first_s * self.factor ** min(attempt - 1, 20), self.longest_s)


class Start(StrEnum):
    """Where a group begins that has no committed offset. With one it always goes on there."""

    EARLIEST = "earliest"
    NONE = "none"


class Later(StrEnum):
    """What happens to the later records of a key that has open letters."""

    WAIT = "wait"
    """They follow it into the queue, so that the handler sees a key's records in order or not at all."""
    GO_ON = "go_on"
    """They are handled; a released letter comes after them. For handlers that read what they need from the log."""


OnDead = Callable[[Record, Why, str], Awaitable[None]]
"""Told of a record that can't be handled, why, and with what error. Repeated until it succeeds: idempotent."""


class Busy(Exception):
    """Raised by a handler: not now; deliver this record again after `after_s`. Not a failure."""

    def __init__(self, after_s: float = 0.1) -> None:
        super().__init__(f"busy for {after_s:g} s")
        self.after_s = after_s


class Pause(msgspec.Struct, frozen=True):
    """A partition that stands still, why, and since when (loop time)."""

    ref: RecordRef
    reason: str
    since: float
    until: float | None
    """Loop time at which it goes on; None: only a restart (with a reader that knows the type) does."""


class GroupConsumer:
    """One member of a consumer group. `run` until cancelled or `stop`."""

    def __init__(
        self,
        log: EventLog,
        name: str,
        topics: Iterable[str],
        handler: Handler,
        *,
        instance: str | None = None,
        start: Start = Start.EARLIEST,
        gap: GapPolicy = GapPolicy.ERROR,
        retry: Retry | None = None,
        handler_s: float = HANDLER_S,
        on_alarm: Callable[[Pause], None] | None = None,
        later: Later = Later.WAIT,
        on_dead: OnDead | None = None,
    ) -> None:
        self.name = name
        self.paused: dict[TopicPartition, Pause] = {}
        """Partitions that stand still now; for health pages and tests."""
        self._log = log
        self._config = log.config
        self._topics = tuple(topics)
        self._handler = handler
        self._instance = instance
        self._start = start
        self._gap = gap
        self._retry = retry or Retry()
        self._handler_s = handler_s
        self._on_alarm = on_alarm
        self._later = later
        self._on_dead = on_dead
        self._letters = DeadLetters(log, name)
        self._poller = Poller(log.config, log.blobs, log.keys)
        self._lock = asyncio.Lock()
        self._ready: set[TopicPartition] = set()  # assigned, and set to a position of our choosing
        self._attempts: dict[TopicPartition, tuple[int, int]] = {}
        self._generation = 0
        self._fault: StreamError | None = None
        self._stopping = asyncio.Event()
        self._next_release_check = 0.0

    @property
    def gaps(self) -> list[Gap]:
        """Gaps this member went over under `GapPolicy.RECORD`."""
        return self._poller.gaps

    @property
    def fault(self) -> str:
        """What a restart alone, of another release, ends; for `state`. Empty: nothing."""
        still = [pause for pause in self.paused.values() if pause.until is None]
        return "; ".join(f"stands still at {pause.ref}: {pause.reason}" for pause in still)

    def stop(self) -> None:
        """Asks `run` to return after the current batch."""
        self._stopping.set()

    async def run(self) -> None:
        """Consumes until `stop`; raises `OffsetGap`, `NoPosition` or `BrokerUnreachable` where going on is wrong."""
        consumer = clients.consumer(
            self._config,
            group_id=self._config.name(self.name),
            group_instance_id=self._instance,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=SESSION_MS // 4,
            rebalance_timeout_ms=max(REBALANCE_MS, int((BATCH_S + self._handler_s) * 1000) + SESSION_MS),
        )
        consumer.subscribe([self._config.name(topic) for topic in self._topics], listener=_Listener(self, consumer))
        await clients.start(self._config, consumer)
        try:
            while not self._stopping.is_set():
                await self._turn(consumer)
                if self._fault is not None:
                    raise self._fault
        finally:
            await clients.stop(consumer)

    async def _turn(self, consumer: AIOKafkaConsumer) -> None:
        """One fetch, its handling and its commit."""
        self._resume_due(consumer)
        active = [tp for tp in self._ready if tp not in self.paused]
        if not active:
            await asyncio.sleep(0.05)
            records = []
        else:
            generation = self._generation
            records = await self._poller.poll(consumer, active, self._gap, limit=BATCH_RECORDS)
        async with self._lock:  # no await between the poll and here unless a rebalance holds the lock
            if records and generation != self._generation:
                await self._rewind(consumer, records)
                return
            await self._handle_batch(consumer, records)
            await self._deliver_released()

    async def _rewind(self, consumer: AIOKafkaConsumer, records: list[Record]) -> None:
        """Partitions changed hands while these were fetched. Where they were fetched for the new assignment already,
        its position has moved past them, and nobody would see them again; where for the old one, it has not."""
        first: dict[TopicPartition, int] = {}
        for record in records:
            first.setdefault(clients.partition(self._config, record.ref.topic, record.ref.partition), record.ref.offset)
        for tp, offset in first.items():
            if tp in self._ready and await consumer.position(tp) > offset:
                consumer.seek(tp, offset)

    def _resume_due(self, consumer: AIOKafkaConsumer) -> None:
        now = asyncio.get_running_loop().time()
        for tp, pause in list(self.paused.items()):
            if pause.until is not None and pause.until <= now:
                del self.paused[tp]
                consumer.resume(tp)

    # -- one batch ---------------------------------------------------------------------------------------------

    async def _handle_batch(self, consumer: AIOKafkaConsumer, records: list[Record]) -> None:
        by_partition: dict[TopicPartition, list[Record]] = {}
        for record in records:
            tp = clients.partition(self._config, record.ref.topic, record.ref.partition)
            by_partition.setdefault(tp, []).append(record)
        work = (self._handle_partition(consumer, tp, part) for tp, part in by_partition.items())
        for outcome in await asyncio.gather(*work, return_exceptions=True):  # all of them end before one is raised
            if isinstance(outcome, BaseException):
                raise outcome

    async def _handle_partition(self, consumer: AIOKafkaConsumer, tp: TopicPartition, records: list[Record]) -> None:
        clock = asyncio.get_running_loop()
        enough = clock.time() + BATCH_S
        done = records[0].ref.offset
        try:
            for record in records:
                if clock.time() > enough or not await self._handle(consumer, tp, record):
                    consumer.seek(tp, record.ref.offset)
                    break
                done = record.ref.offset + 1
        finally:
            if done > records[0].ref.offset:
                await self._commit(consumer, tp, done)

    async def _handle(self, consumer: AIOKafkaConsumer, tp: TopicPartition, record: Record) -> bool:
        """True when the record is dealt with: handled, or safe in the queue."""
        lane = lane_of(record.ref, record.key_bytes)
        if self._later is Later.WAIT and self._letters.fold.holds_back(self.name, lane):
            await self._letters.put(self.name, record, Why.FOLLOWS, "an earlier record of this key is held back", 0)
            return True
        try:
            _ = record.event
        except UndecodableRecord as error:
            if isinstance(error, DecodeError) or declared(record.ref.topic).open:
                return await self._give_up(consumer, tp, record, Why.DECODE, str(error), 0)
            self._pause(consumer, tp, record, str(error), None)
            return False
        try:
            await self._call(record)
        except UnknownEventType as error:
            self._pause(consumer, tp, record, str(error), None)
            return False
        except Busy as busy:
            self._pause(consumer, tp, record, "busy", busy.after_s)
            return False
        except Exception as error:
            return await self._failed(consumer, tp, record, error)
        self._attempts.pop(tp, None)
        return True

    async def _call(self, record: Record) -> None:
        async with asyncio.timeout(self._handler_s):
            await self._handler(record)

    async def _failed(self, consumer: AIOKafkaConsumer, tp: TopicPartition, record: Record, error: Exception) -> bool:
        offset, attempts = self._attempts.get(tp, (record.ref.offset, 0))
        attempts = attempts + 1 if offset == record.ref.offset else 1
        cause = _cause(record, error)
        if attempts >= self._retry.attempts and not isinstance(error, Retryable):
            self._attempts.pop(tp, None)
            logger.error("%s gives up on %s after %d attempts: %s", self.name, record.ref, attempts, cause)
            return await self._give_up(consumer, tp, record, Why.HANDLER, cause, attempts)
        self._attempts[tp] = (record.ref.offset, attempts)
        if attempts == self._retry.attempts and self._on_alarm is not None:
            self._on_alarm(Pause(record.ref, cause, asyncio.get_running_loop().time(), None))
        logger.warning("%s failed on %s (attempt %d): %s", self.name, record.ref, attempts, cause)
        self._pause(consumer, tp, record, cause, self._retry.wait_s(attempts))
        return False

    async def _give_up(
        self, consumer: AIOKafkaConsumer, tp: TopicPartition, record: Record, why: Why, error: str, attempts: int
    ) -> bool:
        """To the queue, once whoever waits for the record has been told; True when it is there."""
        if self._on_dead is not None:
            try:
                async with asyncio.timeout(self._handler_s):
                    await self._on_dead(record, why, error)
            except Exception as failure:
                logger.warning(
                    "%s: nobody was told of %s: %s: %s", self.name, record.ref, type(failure).__name__, failure
                )
                self._pause(consumer, tp, record, "telling of a dead letter", self._retry.longest_s)
                return False
        await self._letters.put(self.name, record, why, error, attempts)
        return True

    def _pause(
        self, consumer: AIOKafkaConsumer, tp: TopicPartition, record: Record, reason: str, seconds: float | None
    ) -> None:
        now = asyncio.get_running_loop().time()
        pause = Pause(record.ref, reason, now, None if seconds is None else now + seconds)
        self.paused[tp] = pause
        consumer.pause(tp)
        if seconds is None:
            logger.error("%s stands still at %s: %s", self.name, record.ref, reason)
            if self._on_alarm is not None:
                self._on_alarm(pause)

    async def _commit(self, consumer: AIOKafkaConsumer, tp: TopicPartition, offset: int) -> None:
        """A refused commit (the partition is no longer ours) only means that its records are delivered again."""
        try:
            async with clients.guarded(self._config, "committing", tp.topic, self._config.request_timeout_s):
                await consumer.commit({tp: offset})
        except StreamError as error:
            logger.warning("%s could not commit %s/%d@%d: %s", self.name, tp.topic, tp.partition, offset, error)
        except kafka.IllegalStateError as error:
            logger.warning("%s no longer owns %s/%d: %s", self.name, tp.topic, tp.partition, error)

    # -- released letters --------------------------------------------------------------------------------------

    async def _deliver_released(self) -> None:
        """Gives released letters of this member's partitions to the handler, oldest first in each key."""
        now = asyncio.get_running_loop().time()
        if now < self._next_release_check:
            return
        self._next_release_check = now + RELEASE_CHECK_S
        await self._letters.catch_up()
        for letter in list(self._letters.fold.due(self.name)):
            origin = clients.partition(self._config, letter.origin.topic, letter.origin.partition)
            if origin in self._ready and await self._redeliver(letter):
                self._next_release_check = now  # the key's next letter is due at once

    async def _redeliver(self, letter: DeadLetter) -> bool:
        error = ""
        for attempt in range(1, self._retry.attempts + 1):
            try:
                (record,) = await self._poller.redeemed([letter.record()])
                _ = record.event
                await self._call(record)
            except (Busy, Retryable):
                return False  # not the letter's fault: it stays released and comes again
            except Exception as failure:
                error = _cause(record, failure)
                if isinstance(failure, StreamError) or attempt == self._retry.attempts:
                    break
                await asyncio.sleep(self._retry.wait_s(attempt))
            else:
                delivered = DeadLetterDelivered(consumer=self.name, letter=letter.offset)
                await self._letters.decide(delivered, "delivered", letter.offset)
                return True
        refused = DeadLetterRefused(consumer=self.name, letter=letter.offset, error=error)
        await self._letters.decide(refused, "refused", letter.offset, self._letters.fold.position)
        return False

    # -- rebalances --------------------------------------------------------------------------------------------

    async def revoked(self) -> None:
        """Waits for the batch in hand, then forgets what belonged to the old assignment."""
        async with self._lock:
            self._generation += 1
            self._ready.clear()
            self.paused.clear()
            self._attempts.clear()

    async def assigned(self, consumer: AIOKafkaConsumer, tps: Iterable[TopicPartition]) -> None:
        """Sets each new partition to the committed offset (or the declared start) and reads the queue to its end."""
        async with self._lock:
            self._generation += 1
            await self._letters.catch_up()
            for tp in tps:
                committed = await consumer.committed(tp)
                if committed is None and self._start is Start.NONE:
                    self._fault = NoPosition(
                        f"group {self.name} has no committed offset for {self._config.bare(tp.topic)}/{tp.partition}: "
                        f"start it once with Start.EARLIEST, or restore the group's offsets",
                        group=self.name,
                        topic=self._config.bare(tp.topic),
                        partition=tp.partition,
                    )
                    return
                consumer.seek(tp, (await consumer.beginning_offsets([tp]))[tp] if committed is None else committed)
                self._ready.add(tp)

    def failed_rebalance(self, error: StreamError) -> None:
        """Makes `run` raise: the client library would only log it."""
        self._fault = error


def _cause(record: Record, error: Exception) -> str:
    """For the queue and for logs. A handler's error may quote what it handled: of somebody's record only its name."""
    name = type(error).__name__
    return f"{name}: {error}" if subject_of(record) is None else f"{name} (its text may quote encrypted content)"


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """Hands rebalances to the consumer and keeps errors from being swallowed by the client library."""

    def __init__(self, owner: GroupConsumer, consumer: AIOKafkaConsumer) -> None:
        self._owner = owner
        self._consumer = consumer

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        await self._owner.revoked()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        try:
            await self._owner.assigned(self._consumer, assigned)
        except StreamError as error:
            self._owner.failed_rebalance(error)
        except (kafka.KafkaError, OSError) as error:
            self._owner.failed_rebalance(clients.translated(self._owner._config, error, "taking partitions"))
