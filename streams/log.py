"""EventLog: append to and read from the log. What every actor holds.

Promises: an append that returned is durable (all in-sync replicas, idempotent producer); appends awaited one after
another, and the items of one `append_many`, keep their order; reads see committed records only and never skip one
silently (a gap is `OffsetGap`, unless the caller asks for gaps to be recorded); every wait has a deadline and its error
names broker and topic. Topics are named without the deployment prefix everywhere in this interface.

Not here: transactions (`transactions.py`), group consumers (`consumers.py`), object storage (`blobs.py`).

Guarantee 1 (tests/GUARANTEES.md): test_log_durability.py, test_consumer_group.py.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import Any, Self

import msgspec
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka

from odradek.streams import clients, topics
from odradek.streams.blobs import BlobStore
from odradek.streams.codec import INLINE_LIMIT
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import BOX_HEADER, SUBJECT_HEADER, Event, Headers, Record, claimed, encode, place_of
from odradek.streams.errors import AppendUncertain, DeadlineExceeded, OffsetGap, StreamError
from odradek.streams.events.meta import RecordRef
from odradek.streams.polling import POLL_MS, Gap, GapPolicy, Poller, gap_error
from odradek.streams.priority import Apart
from odradek.streams.privacy import content
from odradek.streams.privacy.ring import KeyRing

logger = logging.getLogger(__name__)

STALL_S = 30.0
"""Seconds a reader may go without any progress before its end. Too low: a leader change breaks a fold. Too high: a
dead broker is noticed late."""

READERS = 8
"""Range reads that run at one time in a process, each on a connection of its own; production has as many again. Too
low: a batch is materialised one session after another. Too high: connections and fetch buffers."""

RANGE_WAIT_MS = 20
"""Milliseconds a broker may hold a range read's fetch. The data is there; a longer wait would only make the next read
on the same connection stand behind a fetch that nobody wants any more."""

APPEND_GRACE_S = 5.0
"""Seconds an append waits beyond the client's own time-out, so that the client's reason is the one reported."""

STABLE_S = 60.0
"""Seconds to wait for other writers' transactions to end: their time-out, and the 10 s rhythm in which a broker looks
for expired ones, have to fit."""

STABLE_POLL_S = 0.02
"""Seconds between looks at the last stable offset. Too low: requests. Too high: a stage opens late."""

KEYS_REMEMBERED = 200_000
"""Keys whose first offset a process remembers, so that folding a session does not read the partition from its start.
Too low: long scans. Too high: memory (about 150 bytes each)."""


class EventLog:
    """One process's access to the log. Use as an async context manager, or `start`/`stop`."""

    def __init__(self, config: KafkaConfig, blobs: BlobStore | None = None, keys: KeyRing | None = None) -> None:
        self.config = config
        self.blobs = blobs
        """Where values above codec.INLINE_LIMIT go; without it they stay on the log, up to clients.MAX_RECORD_BYTES."""
        self.keys = keys
        """Encrypts and opens the content of events that are somebody's; without it they are written as they are, and
        what others encrypted is read without its content."""
        self._poller = Poller(config, blobs, keys)
        self._producers: dict[str | None, AIOKafkaProducer] = {}
        self._producer_lock = asyncio.Lock()
        self._idle: list[AIOKafkaConsumer] = []
        self._slots = Apart(lambda: asyncio.Semaphore(READERS))
        self._offsets: dict[bool, AIOKafkaConsumer] = {}
        self._offsets_lock = asyncio.Lock()
        self._first: OrderedDict[tuple[str, int, str], int] = OrderedDict()
        self._scanned: dict[tuple[str, int], int] = {}

    @property
    def gaps(self) -> list[Gap]:
        """Gaps that readers of this log went over under `GapPolicy.RECORD`."""
        return self._poller.gaps

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Reaches the broker once, so that a wrong address is one clear error now and not a stall later."""
        await self._offset_client(committed=True)

    async def stop(self) -> None:
        """Sends what is pending and closes every connection."""
        open_clients: list[Any] = [*self._producers.values(), *self._idle, *self._offsets.values()]
        self._producers.clear()
        self._idle.clear()
        self._offsets.clear()
        await asyncio.gather(*(clients.stop(client) for client in open_clients))

    # -- append ------------------------------------------------------------------------------------------------

    async def append(
        self, topic: str, key: str, event: Event[Any], *, partition: int | None = None, deadline_s: float | None = None
    ) -> RecordRef:
        """Writes one event and returns its coordinates once all in-sync replicas have it."""
        value, headers = await self.encoded(topic, key, event)
        return await self.append_raw(topic, key.encode(), value, headers, partition=partition, deadline_s=deadline_s)

    async def append_many(self, topic: str, items: Iterable[tuple[str, Event[Any]]]) -> list[RecordRef]:
        """Writes events in the given order, pipelined; all are durable on return. After an error some may be."""
        row = topics.declared(topic)
        producer = await self._producer(row.compression)
        limit = self.config.request_timeout_s + APPEND_GRACE_S
        key = ""
        try:
            async with asyncio.timeout(limit):
                encoded = [(key, *await self.encoded(topic, key, event)) for key, event in items]
                pending = []  # one that must not be written (its subject was erased) keeps all of them from the log
                for key, value, headers in encoded:
                    number = None if row.open else row.partition_of(key)
                    pending.append(await self._send(producer, topic, key.encode(), value, headers, number))
                done = [await one for one in pending]
        except (kafka.KafkaError, TimeoutError, OSError) as error:
            await self._retire(row.compression, producer)
            raise self._append_error(error, topic, key.encode(), limit) from error
        return [RecordRef(topic=topic, partition=one.partition, offset=one.offset) for one in done]

    async def encoded(self, topic: str, key: str, event: Event[Any]) -> tuple[bytes, Headers]:
        """Value and headers to write. Content that is somebody's is encrypted for them (`SubjectErased` if they were
        erased); a large value is put into the blob store first and becomes a claim check."""
        if event.meta.subject and self.keys is not None:
            event = await self._encrypted(self.keys, topic, key, event)
        value, headers = encode(event)
        if self.blobs is None or len(value) <= INLINE_LIMIT:
            return value, headers
        return claimed(headers, await self.blobs.put(value, subject=event.meta.subject))

    async def _encrypted(self, keys: KeyRing, topic: str, key: str, event: Event[Any]) -> Event[Any]:
        """The event without its content, which goes along as a box, or as an object of the subject's if it is large: so
        the structure can be read when the content is gone."""
        parts = content.split(event.body)
        if parts is None:
            return event
        body, plain, lengths = parts
        subject = event.meta.subject
        place = place_of(topic, key.encode(), event.id.encode(), event.type.encode(), subject)
        box = (await keys.obtain(subject)).encrypt(plain, place)
        extra: Headers = (*event.extra, (SUBJECT_HEADER, subject.encode()))
        if self.blobs is not None and len(box) > INLINE_LIMIT:
            ref = await self.blobs.put_encrypted(box, subject)
            extra, box = (*extra, (BOX_HEADER, msgspec.msgpack.encode(ref))), b""
        meta = content.without(event.meta, box, lengths)
        return Event(event.id, event.type, event.source, meta, body, event.traceparent, extra)

    async def append_raw(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        *,
        partition: int | None = None,
        deadline_s: float | None = None,
    ) -> RecordRef:
        """Writes bytes as they are; for dead letters and tests. Everything else appends events."""
        row = topics.declared(topic)
        if partition is None and not row.open and key is not None:
            partition = row.partition_of(key.decode("utf-8", "backslashreplace"))
        producer = await self._producer(row.compression)
        limit = deadline_s if deadline_s is not None else self.config.request_timeout_s + APPEND_GRACE_S
        try:
            async with asyncio.timeout(limit):
                done = await (await self._send(producer, topic, key, value, headers, partition))
        except (kafka.KafkaError, TimeoutError, OSError) as error:
            await self._retire(row.compression, producer)
            raise self._append_error(error, topic, key, limit) from error
        return RecordRef(topic=topic, partition=done.partition, offset=done.offset)

    async def _send(
        self,
        producer: AIOKafkaProducer,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
        partition: int | None,
    ) -> "asyncio.Future[Any]":
        """Hands a record to the producer; the future is its acknowledgement."""
        sent: asyncio.Future[Any] = await producer.send(
            self.config.name(topic), value=value, key=key, partition=partition, headers=list(headers)
        )
        return sent

    def _append_error(self, error: BaseException, topic: str, key: bytes | None, limit: float) -> StreamError:
        """A refusal says why; silence means that nobody knows whether the event is on the log."""
        known = clients.translated(self.config, error, "appending", topic)
        if isinstance(known, DeadlineExceeded) or isinstance(error, kafka.KafkaTimeoutError):
            return AppendUncertain(
                f"append to {topic} (key {key!r}) was not acknowledged by {self.config.bootstrap} within {limit:g} s: "
                f"append the same event again",
                topic=topic,
                bootstrap=self.config.bootstrap,
            )
        return known

    async def _producer(self, compression: str | None) -> AIOKafkaProducer:
        if (present := self._producers.get(compression)) is not None:
            return present
        async with self._producer_lock:
            if compression not in self._producers:
                fresh = clients.producer(self.config, compression=compression)
                await clients.start(self.config, fresh)
                self._producers[compression] = fresh
            return self._producers[compression]

    async def _retire(self, compression: str | None, producer: AIOKafkaProducer) -> None:
        """After a failed append the producer's sequence numbers may have a hole: the next append takes a fresh one."""
        if self._producers.get(compression) is producer:
            del self._producers[compression]
            task = asyncio.create_task(clients.stop(producer))
            _background.add(task)
            task.add_done_callback(_background.discard)

    # -- offsets -----------------------------------------------------------------------------------------------

    async def stable_end(self, topic: str, partition: int) -> int:
        """The last stable offset: the first offset that a committed reader cannot see yet."""
        return (await self.stable_ends(topic, [partition]))[partition]

    async def stable_ends(self, topic: str, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """Last stable offset of several (default: all) partitions."""
        return await self._list_offsets("end_offsets", topic, partitions, committed=True)

    async def wait_stable(self, topic: str, partition: int, end: int, deadline_s: float = STABLE_S) -> None:
        """Waits until committed readers can see everything before `end`. A transaction's markers are written shortly
        after its commit returns, and another writer's open transaction holds the partition back."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + deadline_s
        while (stable := await self.stable_end(topic, partition)) < end:
            if clock.time() > deadline:
                raise DeadlineExceeded(
                    f"{topic}/{partition} at {self.config.bootstrap} is stable up to {stable}, expected {end} within "
                    f"{deadline_s:g} s: a writer holds a transaction open",
                    topic=topic,
                    partition=partition,
                )
            await asyncio.sleep(STABLE_POLL_S)

    async def high_water(self, topic: str, partition: int) -> int:
        """The raw end of a partition, open transactions included."""
        return (await self._list_offsets("end_offsets", topic, [partition], committed=False))[partition]

    async def beginning(self, topic: str, partition: int) -> int:
        """The first offset that still exists."""
        return (await self._list_offsets("beginning_offsets", topic, [partition], committed=True))[partition]

    async def partitions(self, topic: str) -> list[int]:
        """The partitions of a topic, from the table (open tenants' topics included)."""
        return list(range(topics.declared(topic).partitions))

    async def offsets_for_time(self, topic: str, when: datetime) -> dict[int, int]:
        """By partition, the first offset whose record time is at or after `when` (the stable end if none is)."""
        client = await self._offset_client(committed=True)
        stamp = int(when.timestamp() * 1000)
        wanted = {clients.partition(self.config, topic, number): stamp for number in await self.partitions(topic)}
        async with clients.guarded(self.config, "looking up offsets by time", topic, self.config.request_timeout_s):
            await clients.know(client, self.config.name(topic))
            found = await client.offsets_for_times(wanted)
        ends = await self.stable_ends(topic)
        return {tp.partition: at.offset if at is not None else ends[tp.partition] for tp, at in found.items()}

    async def _list_offsets(
        self, method: str, topic: str, partitions: Iterable[int] | None, *, committed: bool
    ) -> dict[int, int]:
        numbers = list(partitions) if partitions is not None else await self.partitions(topic)
        client = await self._offset_client(committed=committed)
        wanted = [clients.partition(self.config, topic, number) for number in numbers]
        async with clients.guarded(self.config, "looking up offsets", topic, self.config.request_timeout_s):
            await clients.know(client, self.config.name(topic))
            found: dict[TopicPartition, int] = await getattr(client, method)(wanted)
        return {tp.partition: offset for tp, offset in found.items()}

    async def _offset_client(self, *, committed: bool) -> AIOKafkaConsumer:
        async with self._offsets_lock:
            if committed not in self._offsets:
                fresh = clients.consumer(self.config, committed=committed)
                await clients.start(self.config, fresh)
                self._offsets[committed] = fresh
            return self._offsets[committed]

    # -- read --------------------------------------------------------------------------------------------------

    async def read(
        self,
        topic: str,
        partition: int,
        start: int,
        end: int | None = None,
        *,
        gap: GapPolicy = GapPolicy.ERROR,
        stall_s: float = STALL_S,
    ) -> AsyncGenerator[Record, None]:
        """Records of [start, end) in order; `end` is the stable end as of now unless given. Decoding is the caller's,
        record by record, so that one bad record does not hide the others. A caller that leaves early closes the
        generator (`contextlib.aclosing`) to free its connection at once."""
        stop = end if end is not None else await self.stable_end(topic, partition)
        if start >= stop:
            if end is None and start > stop:
                raise gap_error(topic, partition, start, stop)
            return
        async with (
            self._reader() as consumer,
            aclosing(self._range(consumer, topic, partition, start, stop, gap, stall_s)) as records,
        ):
            async for record in records:
                yield record

    async def _range(
        self,
        consumer: AIOKafkaConsumer,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        gap: GapPolicy,
        stall_s: float,
    ) -> AsyncGenerator[Record, None]:
        tp = clients.partition(self.config, topic, partition)
        consumer.assign([tp])
        async with clients.guarded(self.config, "reading", topic, self.config.request_timeout_s):
            await clients.know(consumer, tp.topic)
        consumer.seek(tp, start)
        position = start
        clock = asyncio.get_running_loop()
        last_progress = clock.time()
        while position < stop:
            batch = await self._poller.poll(consumer, [tp], gap)
            for record in batch:
                if record.ref.offset >= stop:
                    return
                yield record
            moved = await consumer.position(tp)
            if moved > position:
                position, last_progress = moved, clock.time()
            elif clock.time() - last_progress > stall_s:
                raise DeadlineExceeded(
                    f"reading {topic}/{partition} from {self.config.bootstrap}: no record at offset {position} within "
                    f"{stall_s:g} s, though {stop} was promised",
                    topic=topic,
                    partition=partition,
                    offset=position,
                )

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[AIOKafkaConsumer]:
        """A connection for one range read, from the pool; a reader that saw an error is not used again."""
        async with self._slots.mine():
            consumer = self._idle.pop() if self._idle else None
            if consumer is None:
                consumer = clients.consumer(self.config, fetch_max_wait_ms=RANGE_WAIT_MS)
                await clients.start(self.config, consumer)
            healthy = False
            try:
                yield consumer
                healthy = True
            except GeneratorExit:  # the caller broke out of its loop: the connection is fine
                healthy = True
                raise
            finally:
                consumer.pause(*consumer.assignment())  # not unsubscribe: a fetch under way may end in peace
                if healthy:
                    self._idle.append(consumer)
                else:
                    await clients.stop(consumer)

    async def read_ref(self, ref: RecordRef) -> Record:
        """The one record at these coordinates."""
        async with aclosing(self.read(ref.topic, ref.partition, ref.offset, ref.offset + 1)) as records:
            async for record in records:
                return record
        raise OffsetGap.at("no committed record", ref.topic, ref.partition, ref.offset)

    async def read_key(
        self, topic: str, key: str, *, start: int | None = None, end: int | None = None
    ) -> AsyncGenerator[Record, None]:
        """Records of one key up to the stable end, in order: how a session is folded.

        Give `start` (the offset of the key's first record, or any offset before it) where it is known. Without it the
        partition is scanned once per process and the first offsets of its keys are remembered.
        """
        partition = topics.declared(topic).partition_of(key)
        stop = end if end is not None else await self.stable_end(topic, partition)
        if start is None:
            start = await self._first_offset(topic, partition, key, stop)
        wanted = key.encode()
        async with aclosing(self.read(topic, partition, start, stop)) as records:
            async for record in records:
                if record.key_bytes == wanted:
                    yield record

    async def _first_offset(self, topic: str, partition: int, key: str, stop: int) -> int:
        """Where a key begins, from memory, after scanning whatever this process has not scanned yet."""
        place = (topic, partition)
        scanned = self._scanned.get(place)
        if (known := self._first.get((*place, key))) is not None:
            return known
        position = scanned if scanned is not None else await self.beginning(topic, partition)
        async for record in self.read(topic, partition, position, stop):
            self._first.setdefault((*place, record.key or ""), record.ref.offset)
        if len(self._first) > KEYS_REMEMBERED:
            while len(self._first) > KEYS_REMEMBERED // 2:
                self._first.popitem(last=False)
            self._scanned.pop(place, None)
        else:
            self._scanned[place] = max(stop, position)
        return self._first.get((*place, key), stop)

    async def tail(
        self, topic: str, start: Mapping[int, int], *, gap: GapPolicy = GapPolicy.ERROR, stall_s: float = STALL_S
    ) -> AsyncGenerator[Record, None]:
        """Records of the given partitions from the given offsets on, for ever, in order within each partition.

        It waits as long as nothing is written, but not for a broker that has stopped answering: that is
        `BrokerUnreachable` after `stall_s`. Leave the loop (or cancel the task) to end it.
        """
        async with aclosing(self.tail_batches(topic, start, gap=gap, stall_s=stall_s)) as batches:
            async for batch in batches:
                for record in batch:
                    yield record

    async def tail_batches(
        self, topic: str, start: Mapping[int, int], *, gap: GapPolicy = GapPolicy.ERROR, stall_s: float = STALL_S
    ) -> AsyncGenerator[list[Record], None]:
        """Like `tail`, poll by poll: a quiet poll yields an empty list, so that the caller can look at its clock."""
        consumer = clients.consumer(self.config)
        await clients.start(self.config, consumer)
        tps = [clients.partition(self.config, topic, number) for number in sorted(start)]
        silent_polls = 0  # not seconds: a caller that blocks the loop for a minute says nothing about the broker
        try:
            consumer.assign(tps)
            for tp in tps:
                consumer.seek(tp, start[tp.partition])
            answers = _answers(consumer, tps)
            while True:
                batch = await self._poller.poll(consumer, tps, gap)
                yield batch
                latest = _answers(consumer, tps)
                silent_polls = 0 if batch or latest != answers else silent_polls + 1
                answers = latest
                if silent_polls * POLL_MS / 1000 > stall_s:
                    raise clients.unreachable(self.config, TimeoutError())
        finally:
            await clients.stop(consumer)


_background: set[asyncio.Task[None]] = set()
"""Closing tasks of retired producers; held here because the loop keeps weak references only."""


def _answers(consumer: AIOKafkaConsumer, tps: list[TopicPartition]) -> list[int | None]:
    """When the broker last answered a fetch for each partition: changes as long as it lives."""
    return [consumer.last_poll_timestamp(tp) for tp in tps]
