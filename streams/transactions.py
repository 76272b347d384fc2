"""Exactly-once stages: read one input, write outputs, and resume from what was committed.

A stage is one (role, lane) with one transactional id. Its rules (DESIGN §4):
 1. `open` asks for the producer id first, which fences any earlier holder and ends its open transaction;
 2. it then notes the high-water mark of each output partition and waits until the last stable offset reaches it, so
    that everything a predecessor committed is visible;
 3. the caller resumes from the input offset stored in the last committed output record (`last`), never from a group's
    offsets, which fence nothing;
 4. after any time-out inside a transaction the producer is thrown away (`TransactionLost`); `open` again and redo.
`ProducerFenced` means that a newer holder exists: stop, do not reopen.

A transaction costs about 30 ms, and its first produce is often refused once with NOT_ENOUGH_REPLICAS while the markers
of the previous one are being written (the client retries): put much work into each.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka

from odradek.streams import clients, topics
from odradek.streams.envelope import Event, Record
from odradek.streams.errors import ProducerFenced, Terminal, TransactionLost
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.lookback import newest

TRANSACTION_S = 10.0
"""Seconds after which the broker aborts an open transaction. Too low: a slow upload inside one loses the work. Too
high: readers of the output partitions stand still that long when a stage is killed."""

OPEN_S = 60.0
"""Seconds for the producer id and for a predecessor's transaction to end: the broker looks for expired ones every 10 s,
and a fresh broker first creates its transaction log."""

Output = tuple[str, int]
"""A partition the stage writes: topic and number."""


class _Asked(Exception):
    """Ends the transaction of `check_owner`."""


class Transaction:
    """The open transaction of a stage. Appended events become visible together, at commit, or never."""

    def __init__(self, stage: "Stage", producer: AIOKafkaProducer) -> None:
        self._stage = stage
        self._producer = producer

    async def append(self, topic: str, key: str, event: Event[Any]) -> RecordRef:
        """Writes one event into the transaction; its coordinates hold if and when the transaction commits."""
        return (await self.append_many([(topic, key, event)]))[0]

    async def append_many(self, items: Iterable[tuple[str, str, Event[Any]]]) -> list[RecordRef]:
        """Writes (topic, key, event) items in order, pipelined."""
        config = self._stage.log.config
        pending, names = [], []
        for topic, key, event in items:
            number = topics.declared(topic).partition_of(key)
            if (topic, number) not in self._stage.outputs:
                raise Terminal(
                    f"stage {self._stage.transactional_id} writes to {topic}/{number}, which it did not declare as an "
                    f"output, so it would not see its own past there after a restart",
                    topic=topic,
                    partition=number,
                )
            value, headers = await self._stage.log.encoded(topic, key, event)
            names.append(topic)
            pending.append(
                await self._producer.send(
                    config.name(topic), value=value, key=key.encode(), partition=number, headers=list(headers)
                )
            )
        done = [await one for one in pending]
        return [
            RecordRef(topic=topic, partition=one.partition, offset=one.offset)
            for topic, one in zip(names, done, strict=True)
        ]

    async def touch(self) -> None:
        """Writes an empty record, for a transaction that is not to be committed."""
        topic, number = min(self._stage.outputs)
        await (await self._producer.send(self._stage.log.config.name(topic), value=b"", key=b"", partition=number))

    async def cross_check(self, group: str, offsets: Mapping[Output, int]) -> None:
        """Also commits input offsets to a consumer group, for monitoring tools. Nothing resumes from them."""
        config = self._stage.log.config
        named = {clients.partition(config, topic, number): offset for (topic, number), offset in offsets.items()}
        await self._producer.send_offsets_to_transaction(named, config.name(group))


class Stage:
    """One transactional writer. `async with Stage(...)` opens it; see the module for its rules."""

    def __init__(
        self,
        log: EventLog,
        transactional_id: str,
        outputs: Iterable[Output],
        *,
        transaction_s: float = TRANSACTION_S,
    ) -> None:
        self.log = log
        self.transactional_id = transactional_id
        self.outputs = frozenset(outputs)
        self._transaction_s = transaction_s
        self._producer: AIOKafkaProducer | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Fences earlier holders and waits until all they committed can be read. Also how to rejoin after
        `TransactionLost`."""
        await self.close()
        config = self.log.config
        producer = clients.producer(
            config,
            compression=topics.ZSTD,
            transactional_id=config.name(self.transactional_id),
            transaction_timeout_ms=int(self._transaction_s * 1000),
        )
        try:
            async with clients.guarded(config, f"opening stage {self.transactional_id}", "", OPEN_S):
                await producer.start()
        except BaseException:
            await clients.stop(producer)
            raise
        self._producer = producer
        for topic, number in sorted(self.outputs):
            mark = await self.log.high_water(topic, number)
            await self.log.wait_stable(topic, number, mark)

    async def close(self) -> None:
        """Lets go of the producer; an open transaction is left to the broker to abort."""
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await clients.stop(producer)

    async def last(self, topic: str, number: int, accept: Callable[[Record], bool]) -> Record | None:
        """The newest committed record of an output partition that `accept` takes: where the stage resumes from."""
        return await newest(self.log, topic, number, accept)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Commits on a normal exit, aborts on an exception. Raises `TransactionLost` (reopen and redo; after a lost
        commit `last` says whether it took place) or `ProducerFenced` (stop). Committed events become readable a few
        milliseconds later (`EventLog.wait_stable`), when the broker has written the markers."""
        producer = self._producer
        if producer is None:
            raise TransactionLost(f"stage {self.transactional_id} is not open: open it (again) first")
        clock = asyncio.get_running_loop()
        began = clock.time()
        try:
            async with asyncio.timeout(self._transaction_s):
                await producer.begin_transaction()
                yield Transaction(self, producer)
                await producer.commit_transaction()
        except (TimeoutError, kafka.KafkaTimeoutError, kafka.KafkaConnectionError, kafka.RequestTimedOutError) as error:
            await self.close()
            raise self._lost("no answer", clock.time() - began) from error
        except (kafka.ProducerFenced, kafka.InvalidProducerEpoch, kafka.InvalidTxnState) as error:
            await self.close()
            raise self._fenced_or_lost(clock.time() - began) from error
        except kafka.KafkaError as error:
            await self._give_up(producer)
            raise clients.translated(self.log.config, error, f"in a transaction of {self.transactional_id}") from error
        except BaseException:
            await self._give_up(producer)
            raise

    async def check_owner(self) -> None:
        """Raises `ProducerFenced` if a newer holder has taken over. Asks the broker, by a transaction that is aborted
        and that no reader ever sees; for a holder that acts on what it owns without writing."""
        with suppress(_Asked):
            async with self.transaction() as transaction:
                await transaction.touch()
                raise _Asked

    def _fenced_or_lost(self, elapsed: float) -> ProducerFenced | TransactionLost:
        """The broker says the same to a fenced zombie and to a holder whose transaction it timed out; the clock tells
        them apart, because a live holder can only be timed out after the time-out."""
        if elapsed >= self._transaction_s:
            return self._lost("it ran past its time-out", elapsed)
        return ProducerFenced(
            f"stage {self.transactional_id}: a newer holder of this transactional id has taken over; stop this one",
            transactional_id=self.transactional_id,
        )

    def _lost(self, why: str, elapsed: float) -> TransactionLost:
        return TransactionLost(
            f"transaction of {self.transactional_id} lost after {elapsed:.1f} s of {self._transaction_s:g} s: {why}; "
            f"open the stage again and resume from its last committed output",
            transactional_id=self.transactional_id,
        )

    async def _give_up(self, producer: AIOKafkaProducer) -> None:
        """Aborts after the caller's own error; if that fails too, the producer is thrown away and the broker aborts."""
        try:
            async with asyncio.timeout(self._transaction_s):
                await producer.abort_transaction()
        except (TimeoutError, kafka.KafkaError, AssertionError):
            await self.close()
