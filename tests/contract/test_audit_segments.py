"""Guarantee 10 on disk: segments of a stopped broker are rewritten, and `verify` names the place after its start.

One thing is done to every partition at once (a flipped byte, a record dropped, two swapped, batches reordered, the
tail cut off; checksums made right, or left wrong as a bad disk would), the broker is started, and each partition's
verdict is compared with what a reader now sees. A change that no reader can see (a producer's id in a batch's header)
is no change; all others must be found at exactly the first record that differs, or that can't be read any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from support import segment

from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.testing import scratch
from odradek.streams.admin import ensure_topics
from odradek.streams.audit.chain import stored_headers
from odradek.streams.audit.keys import SigningKey
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.scope import audited_topics
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.audit.verify import AuditReport, verify
from odradek.streams.blobs import S3Config
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.errors import StreamError
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event
from odradek.streams.transactions import Stage

pytestmark = pytest.mark.contract

KEY = SigningKey(Ed25519PrivateKey.generate())
PREFIX = "seg"
SEED = int(os.environ.get("ODRADEK_SEED", "0"))

Place = tuple[str, int]
Seen = tuple[list[Record], str]
"""Records that a reader gets, and the error that then stopped it."""


class Disk:
    """A broker of the test's own, whose segments it rewrites while it is stopped."""

    def __init__(self, data: Path, vault: Vault, settings: AuditSettings) -> None:
        self.stack = Stack(data, [Kafka(data)])
        self.logs = data / "kafka" / "logs"
        self.vault = vault
        self.settings = settings
        self.original: dict[Place, bytes] = {}
        self.before: dict[Place, Seen] = {}
        """What a reader got before anything was done."""

    def folder(self, place: Place) -> Path:
        return self.logs / f"{PREFIX}.{place[0]}-{place[1]}"

    def log(self) -> EventLog:
        return EventLog(KafkaConfig(bootstrap=self.stack.address("kafka"), prefix=PREFIX))

    async def fill(self) -> None:
        """Every partition of four topics: compressed and not, with transactions and aborted ones."""
        config = KafkaConfig(bootstrap=self.stack.address("kafka"), prefix=PREFIX)
        await ensure_topics(config)
        async with EventLog(config) as log:
            for part in range(4):  # several batches of several records
                sessions = [
                    (f"s{n}", an_event(MessageReceived(message_id=f"m{part}.{n}", text=f"text {n % 7} " * (n % 5))))
                    for n in range(200)
                ]
                await log.append_many("sessions.v1", sessions)
                tasks = [an_event(TaskPublished(task_id=f"t{part}.{n}", instruction="mend it")) for n in range(30)]
                await log.append_many("tasks.v1", [(event.body.task_id, event) for event in tasks])
            for lane in range(4):
                async with Stage(log, f"controller{lane}", [("groups.v1", lane)]) as stage:
                    for number in range(4):
                        await self._groups(stage, f"main-{lane}", number)
                await log.wait_stable("groups.v1", lane, await log.high_water("groups.v1", lane))
            assert await Notary(log, self.vault, KEY, self.settings).once() == 4 * 230 + 4 * 15

    async def _groups(self, stage: Stage, lane: str, number: int) -> None:
        groups = [GroupDiscarded(group_id=f"g{number}.{part}", lane=lane, reason="refused") for part in range(5)]
        with contextlib.suppress(KeyError):
            async with stage.transaction() as transaction:
                await transaction.append_many([("groups.v1", lane, an_event(group)) for group in groups])
                if number == 1:
                    raise KeyError  # aborted: on the disk, and not for readers

    async def seen(self) -> dict[Place, Seen]:
        """What a reader gets of every partition."""
        async with self.log() as log:
            places = [(topic, n) for topic in await audited_topics(log) for n in await log.partitions(topic)]
            return {place: await self._read(log, place) for place in places}

    @staticmethod
    async def _read(log: EventLog, place: Place) -> Seen:
        records: list[Record] = []
        try:
            async for record in log.read(*place, await log.beginning(*place)):
                records.append(record)
        except StreamError as error:
            return records, str(error)
        return records, ""

    async def verify(self) -> AuditReport:
        async with self.log() as log:
            return await verify(log, self.vault, self.settings.name, {KEY.public})

    def rewrite(self, place: Place, mutation: segment.Mutation, chance: random.Random) -> None:
        path = segment.segment(self.folder(place))
        self.original[place] = path.read_bytes()
        segment.store(path, mutation(chance, segment.batches(self.original[place])))

    def restore(self) -> None:
        for place, data in self.original.items():
            segment.store(segment.segment(self.folder(place)), segment.batches(data))
        self.original.clear()


@pytest.fixture(scope="module")
def disk(s3_config: dict[str, str]) -> Iterator[Disk]:
    with scratch() as data:
        settings = AuditSettings(name=data.name, interval_records=16, lock_days=1)
        vault = Vault(S3Config(**{**s3_config, "bucket": "audit-segments"}), settings)
        disk = Disk(data, vault, settings)
        try:
            disk.stack.up()
            asyncio.run(disk.fill())
            disk.before = asyncio.run(disk.seen())
            disk.stack.down()
            yield disk
        finally:
            disk.stack.down()


def stored(record: Record) -> tuple[object, ...]:
    """What of a record lies on the disk, and not how it was read."""
    return record.ref, record.timestamp_ms, record.key_bytes, record.value, stored_headers(record)


def differs(before: Seen, now: Seen) -> tuple[int, bool] | None:
    """The first offset at which a reader gets something else, and whether that is because it can read no further."""
    (was, _), (records, error) = before, now
    for one, other in zip(was, records, strict=False):
        if stored(one) != stored(other):
            return min(one.ref.offset, other.ref.offset), False
    if len(records) < len(was):
        return was[len(records)].ref.offset, bool(error)
    return None


def tried(disk: Disk, seed: int) -> Counter[str]:
    """One thing done to each partition; returns how many places were located, by what was done."""
    chance, before = random.Random(seed), disk.before
    done = {}
    for place, (records, _) in before.items():
        if len(records) > 3:
            done[place] = chance.choice(segment.MUTATIONS)
            disk.rewrite(place, done[place], chance)
    try:
        disk.stack.up()
        now = asyncio.run(disk.seen())
        report = asyncio.run(disk.verify())
    finally:
        disk.stack.down()
        disk.restore()
    located: Counter[str] = Counter()
    for verdict in report.partitions:
        place = (verdict.topic, verdict.partition)
        what = f"{done[place].__name__ if place in done else 'nothing'} in {place}, seed {seed}"
        expected = differs(before[place], now[place])
        found = verdict.finding
        if expected is None:
            assert found is None, (what, found)
            continue
        assert found is not None, (what, expected)
        assert found.offset == expected[0], (what, expected, found)
        assert (found.kind == "unreadable") == expected[1], (what, expected, found)
        located[done[place].__name__] += 1
    assert {one.topic for one in report.findings} <= {topic for topic, _ in done}
    return located


def test_an_untouched_disk_verifies_after_a_restart(disk: Disk) -> None:
    disk.stack.up()
    try:
        report = asyncio.run(disk.verify())
    finally:
        disk.stack.down()
    assert (report.findings, report.ok, report.not_anchored) == ([], True, 0)
    assert report.verified == sum(len(records) for records, _ in disk.before.values())


def test_whatever_is_done_to_a_stored_segment_is_located(disk: Disk) -> None:
    located = tried(disk, SEED)
    assert located.total() >= 15
    assert len(located) >= 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_200_random_places_of_stored_segments_are_located(disk: Disk) -> None:
    located: Counter[str] = Counter()
    seed = SEED
    while located.total() < 200:
        located += tried(disk, seed)
        seed += 1
        print(f"seed {seed}: {located.total()} located, {dict(located)}", flush=True)
    assert set(located) == {mutation.__name__ for mutation in segment.MUTATIONS}
