"""Guarantee 10 end to end: a notary on a real broker and a real store, and what `verify` says of what was done since.

Records are taken away and put in by reading through a log that shows them so (a stored segment is really rewritten in
`test_audit_segments.py`); anchors and rounds are really forged, cut off and deleted here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from odradek.streams import faults, topics
from odradek.streams.audit.anchors import read_anchors, read_signed, round_digest
from odradek.streams.audit.keys import SigningKey
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.proof import NotProvable, find, prove
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.audit.verify import AuditReport, verify
from odradek.streams.blobs import S3Config
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import ProducerFenced, StoreUnreachable, Terminal
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.events.weights import CurrentWeights
from odradek.streams.log import EventLog
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.testing import an_event, fresh_config
from odradek.streams.transactions import Stage

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

POINTS = [point for point in faults.POINTS if point.startswith("notary.")]
ANCHORS = topics.AUDIT_ANCHORS.name
BUCKET = f"audit-{uuid.uuid4().hex[:10]}"
"""Made by the first notary, with object lock; tests have names of their own in it."""


class World:
    """One deployment: its log, its vault, its notary's key."""

    def __init__(self, log: EventLog, s3: S3Config, settings: AuditSettings) -> None:
        self.log = log
        self.s3 = s3
        self.settings = settings
        self.key = SigningKey(Ed25519PrivateKey.generate())
        self.written = 0

    def vault(self) -> Vault:
        return Vault(self.s3, self.settings)

    def notary(self, key: SigningKey | None = None) -> Notary:
        return Notary(self.log, self.vault(), key or self.key, self.settings)

    async def write(self, count: int, key: str = "s") -> None:
        """Messages of one session."""
        events = [MessageReceived(message_id=f"m{self.written + n}", text=f"text {n}") for n in range(count)]
        items = [(key, an_event(event, "world", event.message_id)) for event in events]
        await self.log.append_many("sessions.v1", items)
        self.written += count

    async def verify(self) -> AuditReport:
        vault = self.vault()
        await vault.open()
        return await verify(self.log, vault, self.settings.name, {self.key.public, *await vault.keys()})

    async def anchors(self) -> list[int]:
        """Counts of all anchors, in order."""
        found = await read_anchors(self.log, self.settings.name, {self.key.public})
        return [anchor.count for number in sorted(found.rounds) for anchor in found.rounds[number]]


@pytest.fixture
async def world(fresh_config: KafkaConfig, s3_config: dict[str, str]) -> AsyncIterator[World]:
    settings = AuditSettings(name=fresh_config.prefix, interval_records=4, interval_s=60, lock_days=1)
    async with EventLog(fresh_config) as log:
        yield World(log, S3Config(**{**s3_config, "bucket": BUCKET}), settings)


def findings(report: AuditReport) -> list[tuple[str, str, int]]:
    return [(one.kind, one.topic, one.offset) for one in report.findings]


# -- anchoring ---------------------------------------------------------------------------------------------------------


async def test_what_is_anchored_verifies_and_what_came_later_is_told_apart(world: World) -> None:
    await world.write(10)
    assert await world.notary().once() == 10
    assert await world.anchors() == [4, 4, 2]
    await world.write(3)
    report = await world.verify()
    assert (report.ok, report.findings, report.locked) == (True, [], True)
    assert (report.verified, report.not_anchored, report.not_kept) == (10, 3, 0)
    assert report.keys == [world.key.public]


async def test_markers_and_aborted_records_are_no_gaps(world: World) -> None:
    """groups.v1 as stages write it: markers after each transaction, an aborted one between two good ones."""
    async with Stage(world.log, "controller", [("groups.v1", 0)]) as stage:
        for number in range(5):
            with contextlib.suppress(KeyError):
                async with stage.transaction() as transaction:
                    for part in range(2):
                        event = an_event(GroupDiscarded(group_id=f"g{number}.{part}", lane="main-0", reason="refused"))
                        await transaction.append("groups.v1", "main-0", event)
                    if number in (1, 4):
                        raise KeyError  # aborted, the last one at the very end of the partition
    await world.log.wait_stable("groups.v1", 0, await world.log.high_water("groups.v1", 0))
    assert await world.notary().once() == 6
    assert (await world.verify()).verified == 6
    assert await world.notary().once() == 0, "nothing is left but markers"
    report = await world.verify()
    assert (report.ok, report.verified, report.rounds) == (True, 6, 1)


async def test_compacted_topics_are_left_out(world: World) -> None:
    body = CurrentWeights(policy="p", version=1, manifest_key="k", manifest_sha256="s")
    await world.log.append("weights.current.v1", "p", an_event(body))
    await world.write(1)
    assert await world.notary().once() == 1
    assert {one.topic for one in (await world.verify()).partitions}.isdisjoint({"weights.current.v1", "replicas.v1"})


async def test_a_running_notary_anchors_by_itself_and_the_next_one_goes_on_without_a_gap(world: World) -> None:
    settings = msgspec.structs.replace(world.settings, interval_s=0.1)

    async def run_until(verified: int) -> None:
        task = asyncio.create_task(Notary(world.log, world.vault(), world.key, settings).run())
        try:
            async with asyncio.timeout(120):
                while (report := await world.verify()).verified < verified or report.not_kept:
                    assert not task.done(), task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await world.write(5)
    await run_until(5)
    await world.write(7)
    await run_until(12)
    assert (await world.verify()).ok


async def test_what_waits_is_anchored_at_the_start_and_at_the_end_long_before_it_is_due(world: World) -> None:
    """A notary that is restarted more often than its interval would otherwise never anchor anything."""
    settings = msgspec.structs.replace(world.settings, interval_s=3600, interval_records=1000)
    await world.write(5)
    notary = Notary(world.log, world.vault(), world.key, settings)
    running = asyncio.create_task(notary.run())
    async with asyncio.timeout(120):
        while (await world.verify()).verified < 5:
            assert not running.done(), running.result()
        await world.write(2)
        notary.end()
        await running
    report = await world.verify()
    assert (report.ok, report.verified, report.not_anchored, report.not_kept) == (True, 7, 0, 0)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_point_there_is_no_gap_and_every_round_is_kept(world: World, point: str) -> None:
    await world.write(6)
    await world.notary().once()
    await world.write(6)

    async def die() -> None:
        raise faults.Killed

    with faults.armed(point, die), pytest.raises(faults.Killed):
        await world.notary().once()
    assert await world.anchors() == ([4, 2] if point == "notary.before_commit" else [4, 2, 4, 2])
    await world.write(1)
    assert await world.notary().once() == (7 if point == "notary.before_commit" else 1)
    report = await world.verify()
    assert (report.findings, report.verified, report.not_anchored, report.not_kept) == ([], 13, 0, 0)


async def test_a_notary_starts_with_the_rounds_that_the_vault_lacks_and_the_newest_alone(world: World) -> None:
    """However much was signed before, no more than that is in memory."""
    for _ in range(3):
        await world.write(1)
        await world.notary().once()
    signed = await read_signed(world.log, world.settings.name, {world.key.public}, [0, 1, 2])
    assert (signed.rounds, list(signed.held), signed.foreign) == ({0, 1, 2}, [2], [])
    assert [cursor.next for cursor in signed.cursors.values()] == [3]
    assert signed.before == round_digest(signed.held[2])
    assert list((await read_signed(world.log, world.settings.name, {world.key.public}, [0, 2])).held) == [1, 2]


async def test_a_zombie_notary_cannot_write(world: World) -> None:
    await world.write(4)
    reached, release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        if not reached.is_set():
            reached.set()
            await release.wait()

    with faults.armed("notary.before_commit", hold):
        zombie = asyncio.create_task(world.notary().once())
        await asyncio.wait_for(reached.wait(), 60)
        assert await world.notary().once() == 4
        release.set()
        with pytest.raises(ProducerFenced):
            await asyncio.wait_for(zombie, 60)
    report = await world.verify()
    assert (report.findings, report.verified, report.rounds) == ([], 4, 1)


async def test_a_store_that_is_down_holds_up_no_anchor_and_gets_every_round_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.write(4)
    await world.notary().once()
    await world.write(4)
    vault = world.vault()

    async def down(number: int, data: bytes) -> None:
        raise StoreUnreachable("down")

    notary = Notary(world.log, vault, world.key, msgspec.structs.replace(world.settings, interval_s=0.1))
    monkeypatch.setattr(vault, "keep_round", down)
    task = asyncio.create_task(notary.run())
    try:
        async with asyncio.timeout(60):
            while len(await world.anchors()) < 2:
                assert not task.done(), task.result()
        report = await world.verify()
        assert (report.ok, report.verified, report.not_kept) == (True, 8, 1)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await world.notary().once()
    assert (await world.verify()).not_kept == 0


async def test_a_bucket_without_object_lock_is_used_and_the_anchors_say_so(
    world: World, s3_config: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    world.s3 = S3Config(**s3_config)
    await world.write(2)
    await world.notary().once()
    report = await world.verify()
    assert (report.ok, report.locked, report.verified) == (True, False, 2)
    assert [message for message in caplog.messages if "has no object lock: anchors say locked: false" in message]


# -- what was done to the anchors --------------------------------------------------------------------------------------


async def truncated_head(config: KafkaConfig, topic: str, partition: int, before: int) -> None:
    """Really removes the records before an offset."""
    admin = AIOKafkaAdminClient(**config.client_options())
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(config.name(topic), partition): RecordsToDelete(before)})
    finally:
        await admin.close()


async def test_records_removed_at_the_head_are_located(world: World) -> None:
    await world.write(6)
    await world.notary().once()
    number = topics.SESSIONS.partition_of("s")
    await truncated_head(world.log.config, "sessions.v1", number, 3)
    assert findings(await world.verify()) == [("dropped", "sessions.v1", 0)]


async def test_anchors_cut_off_on_the_log_are_told_by_the_vault(world: World) -> None:
    """The whole audit topic is gone, and what it vouched for was changed as well: here, cut off."""
    await world.write(6)
    await world.notary().once()
    await world.write(2)
    await world.notary().once()
    await truncated_head(world.log.config, ANCHORS, 0, await world.log.stable_end(ANCHORS, 0))
    report = await world.verify()
    assert [kind for kind, topic, _ in findings(report) if topic == ANCHORS] == ["round", "round"]
    assert report.verified == 8, "the vault's anchors vouch for the records"
    with pytest.raises(Terminal, match="lacks round 0 of 2"):
        await world.notary().once()


async def test_a_forged_anchor_is_found_and_nothing_builds_on_it(world: World) -> None:
    await world.write(4)
    await world.notary().once()
    found = await read_anchors(world.log, world.settings.name, {world.key.public})
    (anchor,) = found.rounds[0]
    forger = SigningKey(Ed25519PrivateKey.generate())
    forged = msgspec.structs.replace(anchor, round=1, first=4, last=10**9, key=forger.public)
    await world.log.append(ANCHORS, "sessions.v1/0", an_event(forged))
    copied = msgspec.structs.replace(anchor, round=1)
    await world.log.append(ANCHORS, "sessions.v1/0", an_event(copied))
    await world.log.append_raw(ANCHORS, b"k", b"garbage", [("ce_type", b"audit.anchored.v1")])
    assert [(kind, topic) for kind, topic, _ in findings(await world.verify())] == [("anchor", ANCHORS)] * 3
    await world.write(4)
    assert await world.notary().once() == 4, "the notary goes on after its own last anchor"


async def test_a_round_under_lock_survives_deletion_and_overwriting(world: World) -> None:
    await world.write(4)
    await world.notary().once()
    client = world.vault()._client
    key = f"audit/{world.settings.name}/rounds/{0:012d}"
    client.put_object(Bucket=world.s3.bucket, Key=key, Body=b"[]")
    client.delete_object(Bucket=world.s3.bucket, Key=key)
    versions = client.list_object_versions(Bucket=world.s3.bucket, Prefix=key)["Versions"]
    with pytest.raises(client.exceptions.ClientError, match="AccessDenied"):
        client.delete_object(Bucket=world.s3.bucket, Key=key, VersionId=versions[-1]["VersionId"])
    report = await world.verify()
    assert (report.ok, report.verified) == (True, 4)


async def test_a_log_replaced_by_another_one_of_the_same_key_is_told_by_the_vault(
    world: World, s3_config: dict[str, str]
) -> None:
    """Whoever has key and broker, but not the vault: the notary itself refuses to go on."""
    await world.write(4)
    await world.notary().once()
    other = Vault(S3Config(**s3_config), world.settings)
    await truncated_head(world.log.config, ANCHORS, 0, await world.log.stable_end(ANCHORS, 0))
    await world.write(4)
    assert await Notary(world.log, other, world.key, world.settings).once() == 8
    report = await world.verify()
    assert ("round", ANCHORS) in [(kind, topic) for kind, topic, _ in findings(report)]
    with pytest.raises(Terminal, match="holds another history"):
        await world.notary().once()


async def test_a_deployment_without_anchors_is_not_ok(world: World) -> None:
    await world.write(3)
    report = await world.verify()
    assert (report.ok, report.rounds, report.not_anchored, report.findings) == (False, 0, 3, [])


# -- proofs ------------------------------------------------------------------------------------------------------------


async def test_a_record_is_found_by_its_event_id_and_proved_once_it_is_anchored(world: World) -> None:
    await world.write(6)
    await world.notary().once()
    await world.write(1)
    records = [one async for one in world.log.read("sessions.v1", topics.SESSIONS.partition_of("s"), 0)]
    anchors = await read_anchors(world.log, world.settings.name, {world.key.public})
    for record in records[:6]:
        found = await find(world.log, record.event.id, None, lambda _text: None)
        assert found is not None and found.ref == record.ref
        proof = await prove(world.log, anchors, found)
        assert (proof.record.offset, proof.record.value) == (record.ref.offset, record.value)
    with pytest.raises(NotProvable, match="not anchored yet"):
        await prove(world.log, anchors, records[6])
    assert await find(world.log, "no-such-id", "sessions.v1", lambda _text: None) is None


# -- cases from reports ------------------------------------------------------------------------------------------------

FOREIGN = [
    '{"z": 1, "a": 1.0, "text": "\u00e9 e\u0301"}'.encode(),
    '{ "a":1.0 ,"z":1,"text":"e\u0301 \u00e9" }\n'.encode(),
    b"\xff\x00 no text at all",
    b"",
]
"""Temple-Stuart/temple-stuart-accounting PR 499: keys out of order, 1.0, composed and decomposed letters."""


async def test_case_temple_stuart_499_what_is_hashed_are_stored_bytes_whatever_a_reader_would_make_of_them(
    world: World,
) -> None:
    for number, value in enumerate(FOREIGN):
        headers = [("z", b"1"), ("a", b"\xff"), ("z", None), ("content-type", b"application/json")]
        await world.log.append_raw("tasks.v1", f"k{number}".encode(), value, headers, partition=0)
    await world.notary().once()
    script = (
        "import asyncio, json, sys, msgspec\n"
        "from odradek.streams.audit.settings import AuditSettings\n"
        "from odradek.streams.audit.vault import Vault\n"
        "from odradek.streams.audit.verify import verify\n"
        "from odradek.streams.blobs import S3Config\n"
        "from odradek.streams.config import KafkaConfig\n"
        "from odradek.streams.log import EventLog\n"
        "async def main(given):\n"
        "    vault = Vault(S3Config(**given['s3']), AuditSettings(name=given['name']))\n"
        "    await vault.open()\n"
        "    async with EventLog(msgspec.convert(given['kafka'], KafkaConfig)) as log:\n"
        "        report = await verify(log, vault, given['name'], [given['key']])\n"
        "    print(report.ok, report.verified)\n"
        "asyncio.run(main(json.load(sys.stdin)))\n"
    )
    given = {
        "kafka": msgspec.to_builtins(world.log.config),
        "s3": msgspec.to_builtins(world.s3),
        "name": world.settings.name,
        "key": world.key.public,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    answer, _ = await asyncio.wait_for(process.communicate(msgspec.json.encode(given)), 120)
    assert answer.decode().strip() == f"True {len(FOREIGN)}"


# -- guarantee 9 -------------------------------------------------------------------------------------------------------


async def test_the_chain_of_an_erased_subject_stays_valid(world: World, tmp_path: Path) -> None:
    """What was encrypted for a subject is chained as it lies there; whoever has no key, or no longer, verifies it."""
    ring = KeyRing(KeyFiles(tmp_path / "keys"))
    async with EventLog(world.log.config, keys=ring) as log:
        for number in range(6):
            event = an_event(MessageReceived(message_id=f"m{number}", text="mine"), number, meta=Meta(subject="ann"))
            await log.append("sessions.v1", "s", event)
    await world.notary().once()
    records = [one async for one in world.log.read("sessions.v1", topics.SESSIONS.partition_of("s"), 0)]
    assert b"mine" not in b"".join(one.value or b"" for one in records)
    await ring.destroy("ann", "asked")
    report = await world.verify()
    assert (report.findings, report.verified) == ([], 6)
    anchors = await read_anchors(world.log, world.settings.name, {world.key.public})
    assert (await prove(world.log, anchors, records[2])).record.value == records[2].value
