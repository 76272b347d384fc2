"""What a durable turn costs: acks=all, against raw aiokafka in the same run; encryption and notary on and off.

`python tests/bench/bench_durability.py [--rounds N] [--records N]` starts a broker and a store of its own. A round
measures three writers one after another, each with an append at a time and then with 64 sessions side by side; every
other round has a notary at work on the same log, in a process of its own as in a deployment. Numbers are medians over
the rounds, so that what else runs on the machine disturbs all of them alike. Quote the ratios: absolute numbers belong
to the machine. `cpu_us` is the writer's own processor time an append, which other load disturbs least.

Recovery at 50,000 sessions is `bench_recovery.py`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiokafka import AIOKafkaProducer

from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.testing import running, scratch
from odradek.streams import admin, clients
from odradek.streams.audit.keys import load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.blobs import S3Config
from odradek.streams.codec import f32, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, encode, event_id
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import TurnSampled
from odradek.streams.log import EventLog
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing

TOPIC = "sessions.v1"
SESSIONS = 64
"""Writers at one time: a host with many sessions."""
ONE_BY_ONE = 150
"""Appends in a round's latency run."""
SUBJECT = "somebody"
START_S = 60.0
"""Seconds for the notary's process to have read and signed what is there."""

Append = Callable[[str, Event[TurnSampled]], Awaitable[Any]]


class Cost(msgspec.Struct, frozen=True):
    """One writer in one round."""

    one_ms: float
    """Median of an append at a time, until all in-sync replicas have it."""
    per_s: float
    """Appends a second of 64 sessions side by side."""
    cpu_us: float
    """This process's time for each of those."""


def turn(session: int, number: int, subject: str = "") -> Event[TurnSampled]:
    """A turn of about 2 KB."""
    tokens = [(number * 7 + one * 31) % 4096 for one in range(340)]
    body = TurnSampled(
        turn=number,
        position=number,
        prompt=i32(tokens[:230]),
        completion=i32(tokens[230:]),
        logprobs=f32([-0.001 * one for one in tokens[230:]]),
        spans=[],
        numerics_id="bench",
        finish_reason="stop",
    )
    meta = Meta(origin="production", subject=subject, seq=number)
    return Event.of(body, id=event_id(session, number, uuid.uuid4().hex), source="bench", meta=meta)


async def measured(append: Append, records: int, subject: str) -> Cost:
    """Events are made beforehand: what is timed is from the event to its acknowledgement."""
    times = []
    for event in [turn(0, number, subject) for number in range(ONE_BY_ONE)]:
        began = time.perf_counter()
        await append("latency", event)
        times.append(time.perf_counter() - began)
    steps = records // SESSIONS
    events = [[turn(session, step, subject) for step in range(steps)] for session in range(SESSIONS)]

    async def session(number: int) -> None:
        for event in events[number]:
            await append(f"s{number}", event)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = steps * SESSIONS
    return Cost(statistics.median(times) * 1000, count / took, cpu / count * 1e6)


async def through_log(config: KafkaConfig, keys: KeyRing | None, records: int) -> Cost:
    async with EventLog(config, keys=keys) as log:
        return await measured(
            lambda key, event: log.append(TOPIC, key, event), records, SUBJECT if keys is not None else ""
        )


async def raw(config: KafkaConfig, records: int) -> Cost:
    """The same client with the same settings; it encodes the event and nothing else."""
    producer = AIOKafkaProducer(
        bootstrap_servers=config.bootstrap,
        enable_idempotence=True,
        acks="all",
        compression_type="zstd",
        max_batch_size=clients.BATCH_BYTES,
    )
    await producer.start()

    async def append(key: str, event: Event[TurnSampled]) -> None:
        value, headers = encode(event)
        await producer.send_and_wait(config.name(TOPIC), value, key=key.encode(), headers=list(headers))

    try:
        return await measured(append, records, "")
    finally:
        await producer.stop()


# -- the notary -------------------------------------------------------------------------------------------------------


class NotaryJob(msgspec.Struct, frozen=True):
    """What the notary's process is told."""

    kafka: KafkaConfig
    s3: S3Config
    settings: AuditSettings


async def notarise(job: NotaryJob) -> None:
    vault = Vault(job.s3, job.settings)
    await vault.open(create=True)
    async with EventLog(job.kafka) as log:
        notary = Notary(log, vault, load_or_make_key(Path(job.settings.key_file)), job.settings)
        await notary.run()


@asynccontextmanager
async def notary(job: NotaryJob, on: bool) -> AsyncIterator[None]:
    if not on:
        yield
        return
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, __file__, "--notary"], stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(job))
    process.stdin.close()
    try:
        await until_anchored(job.kafka)
        yield
        assert process.returncode is None, "the notary died: nothing was measured with it"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def until_anchored(config: KafkaConfig) -> None:
    """Until the notary has written a round since now."""
    async with EventLog(config) as log, asyncio.timeout(START_S):
        before = await log.stable_end("audit.anchors.v1", 0)
        await log.append(TOPIC, "warm", turn(0, 0))
        while await log.stable_end("audit.anchors.v1", 0) <= before:  # noqa: ASYNC110 - another process's progress
            await asyncio.sleep(0.1)


# -- the run ----------------------------------------------------------------------------------------------------------


async def measure(config: KafkaConfig, job: NotaryJob, folder: Path, rounds: int, records: int) -> dict[str, Any]:
    await admin.ensure_topics(config)
    ring = KeyRing(KeyFiles(folder / "keys"))
    writers: list[tuple[str, Callable[[], Awaitable[Cost]]]] = [
        ("aiokafka", lambda: raw(config, records)),
        ("eventlog", lambda: through_log(config, None, records)),
        ("eventlog_encrypted", lambda: through_log(config, ring, records)),
    ]
    found: dict[tuple[bool, str], list[Cost]] = {}
    for _, write in writers:
        await write()  # the first of each pays for imports, connections and empty partitions
    for number in range(rounds * 2):
        signed = number % 2 == 1
        async with notary(job, signed):
            for at in range(len(writers)):
                name, write = writers[(at + number // 2) % len(writers)]
                found.setdefault((signed, name), []).append(await write())
    return {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg(),
        },
        "value_bytes": len(encode(turn(1, 1))[0]),
        "rounds": rounds,
        "notary_off": told(found, False),
        "notary_on": told(found, True),
    }


def told(found: dict[tuple[bool, str], list[Cost]], signed: bool) -> dict[str, Any]:
    base = found[signed, "aiokafka"]
    shown: dict[str, Any] = {}
    for (with_notary, name), costs in found.items():
        if with_notary == signed:
            shown[name] = {
                field: round(statistics.median(getattr(cost, field) for cost in costs), 3)
                for field in Cost.__struct_fields__
            } | {
                f"{field}_to_aiokafka": round(
                    statistics.median(
                        getattr(ours, field) / getattr(theirs, field) for ours, theirs in zip(costs, base, strict=True)
                    ),
                    3,
                )
                for field in Cost.__struct_fields__
            }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=3_200)
    parser.add_argument("--notary", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.notary:
        asyncio.run(notarise(msgspec.json.decode(sys.stdin.buffer.read(), type=NotaryJob)))
        return
    with scratch() as data:
        store = Seaweed(data)
        with running(data, Kafka(data), store) as stack:
            access = store.access(stack.address("s3"))
            assert access.endpoint is not None and access.keys is not None
            config = KafkaConfig(bootstrap=stack.address("kafka"), prefix="bench")
            s3 = S3Config("bench-audit", access.endpoint, access.region, access.keys.access_key, access.keys.secret_key)
            settings = AuditSettings(
                name="bench", key_file=str(data / "notary.pem"), bucket="bench-audit", interval_s=1
            )
            job = NotaryJob(config, s3, settings)
            found = asyncio.run(measure(config, job, data, options.rounds, options.records))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
