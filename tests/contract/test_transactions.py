"""Exactly-once stages against a real broker: the rules of streams/transactions.py, one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from odradek.streams.clients import consumer, partition, start, stop
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import ProducerFenced, Terminal, TransactionLost
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, event_log, fresh_config, kafka_config, key
from odradek.streams.transactions import Stage

__all__ = ["event_log", "fresh_config", "kafka_config", "key"]
pytestmark = pytest.mark.contract

LANE = "lane-0"


def batch(ordinal: int, input_offset: int = -1) -> BatchAssembled:
    return BatchAssembled(
        batch_id=f"b{ordinal}",
        lane=LANE,
        policy="p",
        ordinal=ordinal,
        groups=[],
        dropped=[],
        members=[],
        layout=[],
        merkle_root="",
        assembler_version=1,
        config_offset=0,
        input_offset=input_offset,
    )


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


async def ordinals(log: EventLog) -> list[int]:
    await log.wait_stable("batches.v1", 0, await log.high_water("batches.v1", 0))
    return [record.event.body.ordinal async for record in log.read("batches.v1", 0, 0)]


async def raw_count(log: EventLog) -> int:
    """Records on the partition whether committed or not: proof that an aborted one really was written."""
    reader = consumer(log.config, committed=False)
    await start(log.config, reader)
    try:
        tp = partition(log.config, "batches.v1", 0)
        reader.assign([tp])
        reader.seek(tp, 0)
        end, count = (await reader.end_offsets([tp]))[tp], 0
        while await reader.position(tp) < end:
            count += len((await reader.getmany(tp, timeout_ms=200)).get(tp, []))
        return count
    finally:
        await stop(reader)


async def test_events_of_one_transaction_become_visible_together(log: EventLog) -> None:
    async with Stage(log, "assembler/0", [("batches.v1", 0), ("groups.v1", 0)]) as stage:
        async with stage.transaction() as transaction:
            first = await transaction.append("batches.v1", LANE, an_event(batch(0)))
            await transaction.append(
                "groups.v1", LANE, an_event(GroupDiscarded(group_id="g", lane=LANE, reason="refused"))
            )
            assert await log.stable_end("batches.v1", 0) == first.offset
            assert await log.high_water("batches.v1", 0) == first.offset + 1
        assert await ordinals(log) == [0]
        assert len([record async for record in log.read("groups.v1", 0, 0)]) == 1


async def test_an_aborted_transaction_is_written_and_never_read(log: EventLog) -> None:
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as stage:
        with pytest.raises(ZeroDivisionError):
            async with stage.transaction() as transaction:
                await transaction.append("batches.v1", LANE, an_event(batch(0)))
                raise ZeroDivisionError
        async with stage.transaction() as transaction:
            await transaction.append("batches.v1", LANE, an_event(batch(1)))
        assert await ordinals(log) == [1]
        assert await raw_count(log) == 2


async def test_opening_a_stage_fences_the_zombie(log: EventLog) -> None:
    zombie = Stage(log, "assembler/0", [("batches.v1", 0)])
    await zombie.open()
    async with zombie.transaction() as transaction:
        await transaction.append("batches.v1", LANE, an_event(batch(0)))
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as heir:
        with pytest.raises(ProducerFenced, match="assembler/0"):
            async with zombie.transaction() as transaction:
                await transaction.append("batches.v1", LANE, an_event(batch(1)))
        async with heir.transaction() as transaction:
            await transaction.append("batches.v1", LANE, an_event(batch(2)))
    assert await ordinals(log) == [0, 2]


async def test_the_heir_sees_no_part_of_a_transaction_left_open(log: EventLog) -> None:
    dead = Stage(log, "assembler/0", [("batches.v1", 0)])
    await dead.open()
    entered = dead.transaction()
    transaction = await entered.__aenter__()
    await transaction.append("batches.v1", LANE, an_event(batch(7)))
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as heir:
        assert await log.stable_end("batches.v1", 0) == await log.high_water("batches.v1", 0)
        assert await heir.last("batches.v1", 0, lambda _: True) is None
        assert await raw_count(log) == 1
    with pytest.raises(ProducerFenced):
        await entered.__aexit__(None, None, None)


async def test_the_stage_resumes_from_its_last_committed_output(log: EventLog) -> None:
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as stage:
        for ordinal in range(3):
            async with stage.transaction() as transaction:
                await transaction.append("batches.v1", LANE, an_event(batch(ordinal, input_offset=10 * ordinal)))
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as stage:
        last = await stage.last("batches.v1", 0, lambda record: record.event.type == "batch.assembled.v1")
        assert last is not None
        assert (last.event.body.ordinal, last.event.body.input_offset) == (2, 20)


async def test_the_last_output_is_found_far_back(log: EventLog) -> None:
    await log.append("batches.v1", LANE, an_event(batch(0)))
    await log.append_many("batches.v1", [(LANE, an_event(batch(n))) for n in range(1, 300)])
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as stage:
        last = await stage.last("batches.v1", 0, lambda record: record.event.body.ordinal == 0)
        assert last is not None
        assert last.ref.offset == 0


async def test_a_transaction_past_its_time_out_is_lost_and_the_stage_can_rejoin(log: EventLog) -> None:
    stage = Stage(log, "assembler/0", [("batches.v1", 0)], transaction_s=1.0)
    await stage.open()
    with pytest.raises(TransactionLost, match="open the stage again"):
        async with stage.transaction() as transaction:
            await transaction.append("batches.v1", LANE, an_event(batch(0)))
            await asyncio.sleep(60)
    with pytest.raises(TransactionLost, match="not open"):
        async with stage.transaction():
            pass
    await stage.open()
    async with stage.transaction() as transaction:
        await transaction.append("batches.v1", LANE, an_event(batch(1)))
    await stage.close()
    assert await ordinals(log) == [1]


async def test_a_stage_writes_only_to_its_declared_outputs(log: EventLog) -> None:
    async with Stage(log, "assembler/0", [("batches.v1", 0)]) as stage:
        with pytest.raises(Terminal, match=r"groups\.v1/0"):
            async with stage.transaction() as transaction:
                await transaction.append(
                    "groups.v1", LANE, an_event(GroupDiscarded(group_id="g", lane=LANE, reason="refused"))
                )


async def number_stage(log: EventLog, stage: Stage, total: int, stop_at: int | None = None) -> None:
    """Copies groups.v1/0 to batches.v1/0, twenty inputs a transaction, resuming from its own output."""
    last = await stage.last("batches.v1", 0, lambda _: True)
    position = 0 if last is None else last.event.body.input_offset + 1
    while position < (stop_at if stop_at is not None else total):
        chunk = [record.ref.offset async for record in log.read("groups.v1", 0, position, position + 20)]
        async with stage.transaction() as transaction:
            await transaction.append_many(
                [("batches.v1", LANE, an_event(batch(offset, input_offset=offset))) for offset in chunk]
            )
        position = chunk[-1] + 1


async def fill(log: EventLog, total: int) -> None:
    await log.append_many(
        "groups.v1",
        [(LANE, an_event(GroupDiscarded(group_id=f"g{n}", lane=LANE, reason="refused"))) for n in range(total)],
    )


async def test_case_faust_323_a_second_worker_joins_and_each_number_appears_once(log: EventLog) -> None:
    """faust-streaming/faust #323: 200 numbered events through a transactional stage, worker B starts at 80."""
    await fill(log, 200)
    worker_a = Stage(log, "numbers/0", [("batches.v1", 0)])
    await worker_a.open()
    await number_stage(log, worker_a, 200, stop_at=80)
    async with Stage(log, "numbers/0", [("batches.v1", 0)]) as worker_b:
        with pytest.raises(ProducerFenced):
            await number_stage(log, worker_a, 200)
        await number_stage(log, worker_b, 200)
    assert await ordinals(log) == list(range(200))


async def test_case_faust_658_a_worker_that_sleeps_past_the_time_out_rejoins(log: EventLog) -> None:
    """robinhood/faust #658: A sleeps past the transaction time-out before its commit, aborts, rejoins and finishes."""
    await fill(log, 200)
    stage = Stage(log, "numbers/0", [("batches.v1", 0)], transaction_s=1.0)
    await stage.open()
    await number_stage(log, stage, 200, stop_at=80)
    with pytest.raises(TransactionLost):
        async with stage.transaction() as transaction:
            await transaction.append("batches.v1", LANE, an_event(batch(80, input_offset=80)))
            await asyncio.sleep(60)
    await stage.open()
    await number_stage(log, stage, 200)
    await stage.close()
    assert await ordinals(log) == list(range(200))
    assert await raw_count(log) == 201
