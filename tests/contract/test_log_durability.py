"""DESIGN §1, 1: an acknowledged event is never lost, whichever process is killed. A broker of its own, to be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.testing import running, scratch
from odradek.streams import admin
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import AppendUncertain, BrokerUnreachable, Retryable
from odradek.streams.events.sessions import SessionResumed
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, kafka_config, key

__all__ = ["kafka_config", "key"]
pytestmark = pytest.mark.contract

WRITER = textwrap.dedent("""
    import asyncio, json, sys
    from odradek.streams.config import KafkaConfig
    from odradek.streams.events.sessions import SessionResumed
    from odradek.streams.log import EventLog
    from odradek.streams.testing import an_event

    async def main(bootstrap, prefix, key):
        async with EventLog(KafkaConfig(bootstrap=bootstrap, prefix=prefix)) as log:
            for number in range(1_000_000):
                event = an_event(SessionResumed(session_id=key, reason=str(number)), key, number)
                ref = await log.append("sessions.v1", key, event)
                print(json.dumps([number, ref.offset]), flush=True)

    asyncio.run(main(*sys.argv[1:]))
""")
"""Appends for ever and prints each acknowledgement."""

ACKNOWLEDGED = 200
"""Acknowledgements before the writer is killed in the middle of the next append."""


def killed_writer(config: KafkaConfig, key: str) -> dict[int, int]:
    """Numbers and offsets that a writer said were acknowledged before it was killed."""
    command = [sys.executable, "-c", WRITER, config.bootstrap, config.prefix, key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(ACKNOWLEDGED)]
        writer.kill()
        lines += writer.stdout.read().splitlines(keepends=True)
    assert writer.returncode == -signal.SIGKILL
    return dict(json.loads(line) for line in lines if line.endswith("\n"))


async def test_what_was_acknowledged_before_the_writer_was_killed_is_on_the_log(
    kafka_config: KafkaConfig, key: str
) -> None:
    acknowledged = await asyncio.to_thread(killed_writer, kafka_config, key)
    async with EventLog(kafka_config) as log:
        found = {int(record.event.body.reason): record.ref.offset async for record in log.read_key("sessions.v1", key)}
    assert len(acknowledged) >= ACKNOWLEDGED
    assert acknowledged.items() <= found.items()
    assert sorted(found) == list(range(len(found)))


@pytest.fixture
def own_stack() -> Iterator[Stack]:
    with scratch() as data, running(data, Kafka(data)) as stack:
        yield stack


def kill_broker(stack: Stack) -> None:
    (status,) = stack.status()
    for pid in status.pids:
        os.kill(pid, signal.SIGKILL)


async def test_a_killed_broker_is_a_typed_error_and_what_it_acknowledged_is_there_when_it_is_back(
    own_stack: Stack, key: str
) -> None:
    config = KafkaConfig(bootstrap=own_stack.address("kafka"), prefix="d", request_timeout_s=3, connect_timeout_s=3)
    await admin.ensure_topics(config)

    def numbered(number: int) -> tuple[str, object]:
        return key, an_event(SessionResumed(session_id=key, reason=str(number)), key, number)

    async with EventLog(config) as log:
        refs = await log.append_many("sessions.v1", [numbered(number) for number in range(100)])  # type: ignore[misc]
        kill_broker(own_stack)
        with pytest.raises((AppendUncertain, BrokerUnreachable), match=config.bootstrap):
            await log.append("sessions.v1", *numbered(100), deadline_s=4)  # type: ignore[arg-type]
        with pytest.raises(Retryable, match=config.bootstrap):
            async with aclosing(log.tail("sessions.v1", {refs[0].partition: 100}, stall_s=2)) as tail:
                await anext(tail)
        await asyncio.to_thread(own_stack.up)
        assert own_stack.address("kafka") == config.bootstrap
        again = await log.append("sessions.v1", *numbered(100), deadline_s=30)  # type: ignore[arg-type]
        found = [int(record.event.body.reason) async for record in log.read_key("sessions.v1", key)]
    assert set(found) == set(range(101))
    assert found[:100] == list(range(100))
    assert again.offset >= 100
