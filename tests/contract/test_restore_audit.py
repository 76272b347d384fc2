"""Guarantee 10 over a restore: Kafka rolled back alone, and what restore, notary and verify then say and do.

Kafka is rolled back as in `test_restore.py`; the vault keeps what was signed.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import Answer, Cli
from support.log_copy import copied, write

from odradek.streams import topics
from odradek.streams.audit import notary
from odradek.streams.audit.anchors import read_anchors
from odradek.streams.audit.chains import rechain
from odradek.streams.audit.keys import SigningKey, load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.proof import prove
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.audit.verify import AuditReport, verify
from odradek.streams.blobs import S3Config
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import Terminal
from odradek.streams.events.audit import ChainBegun
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

ANCHORS = topics.AUDIT_ANCHORS.name
BUCKET = f"audit-{uuid.uuid4().hex[:10]}"


class Audited:
    """A log, and what one deployment's notary keeps of it."""

    def __init__(self, log: EventLog, s3: S3Config, name: str, key_file: Path) -> None:
        self.log, self.s3 = log, msgspec.structs.replace(s3, bucket=BUCKET)
        self.settings = AuditSettings(name=name, interval_records=4, lock_days=1)
        self.key_file, self.key = key_file, load_or_make_key(key_file)

    def under(self, log: EventLog) -> Audited:
        """The same vault and key over another log."""
        return Audited(log, self.s3, self.settings.name, self.key_file)

    def notary(self) -> Notary:
        return Notary(self.log, Vault(self.s3, self.settings), self.key, self.settings)

    async def signed(self, count: int) -> None:
        """So many messages more, in a round of their own."""
        items = [("s", an_event(MessageReceived(message_id=uuid.uuid4().hex, text="hello"))) for _ in range(count)]
        await self.log.append_many("sessions.v1", items)
        assert await self.notary().once() == count

    async def vault(self) -> Vault:
        vault = Vault(self.s3, self.settings)
        await vault.open()
        return vault

    async def restored(self, key: SigningKey | None, **options: Any) -> Any:
        return await rechain(self.log, await self.vault(), self.settings.name, key, **options)

    async def verified(self) -> AuditReport:
        vault = await self.vault()
        return await verify(self.log, vault, self.settings.name, {self.key.public, *await vault.keys()})

    async def chains(self) -> list[str]:
        await self.log.wait_stable(ANCHORS, 0, await self.log.high_water(ANCHORS, 0))
        return [body.chain async for body in bodies(self.log, ANCHORS) if isinstance(body, ChainBegun)]


@pytest.fixture
async def before(fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path) -> AsyncIterator[Audited]:
    async with EventLog(fresh_config) as log:
        yield Audited(log, S3Config(**s3_config), fresh_config.prefix, tmp_path / "notary.key")


@pytest.fixture
async def earlier(kafka_bootstrap: str) -> AsyncIterator[EventLog]:
    """A fresh deployment for the rolled-back log."""
    async with EventLog(KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")) as log:
        yield log


async def rolled_back(before: Audited, earlier: EventLog) -> Audited:
    """The log as it was after its first round, under a vault that has two."""
    await before.signed(4)
    moment = await copied(before.log)
    await before.signed(4)
    await write(earlier.config, moment)
    return before.under(earlier)


async def test_after_kafka_was_rolled_back_one_restore_lets_the_notary_go_on(
    before: Audited, earlier: EventLog
) -> None:
    after = await rolled_back(before, earlier)
    with pytest.raises(Terminal, match=r"lacks round 1 of 2.*`odradek restore` begins a new chain"):
        await after.notary().once()

    name = after.settings.name
    would = await after.restored(after.key, dry_run=True)
    assert await after.chains() == []
    assert await after.restored(after.key, reason="Monday's disk") == would
    assert (would.chain, would.before, would.rounds_lost, would.signed) == (f"{name}/r1", name, 1, True)
    assert await after.notary().once() == 4, "the new chain covers the log from its first record on"
    await after.signed(3)
    report = await after.verified()
    assert (report.findings, report.deployment, report.verified, report.rounds) == ([], f"{name}/r1", 7, 2)
    (told,) = report.given_up
    assert (told.before, told.on_log, told.kept, told.reason) == (name, 1, 2, "Monday's disk")
    record = await after.log.read_ref(RecordRef("sessions.v1", topics.SESSIONS.partition_of("s"), 0))
    anchors = await read_anchors(after.log, report.deployment, report.keys)
    assert f"deployment: {name}/r1\n" in (await prove(after.log, anchors, record)).statement
    vault = await after.vault()
    assert await vault.rounds() == [0, 1], "what was given up stays as it is"
    again = await after.restored(after.key)
    assert (again.why, again.chain, await after.chains()) == ("", f"{name}/r1", [f"{name}/r1"])


async def test_without_the_notarys_key_nothing_is_begun_and_no_name_is_taken_twice(
    before: Audited, earlier: EventLog
) -> None:
    after = await rolled_back(before, earlier)
    name, vault = after.settings.name, await after.vault()
    found = await after.restored(None)
    assert (found.signed, found.chain) == (False, f"{name}/r1") and "lacks round 1" in found.why
    assert await after.chains() == []
    vault.chain = f"{name}/r1"  # begun by a log that was rolled back again: only the vault remembers
    await vault.keep_key(after.key.public)
    assert (await after.restored(after.key)).chain == f"{name}/r2"


async def test_a_partition_that_ends_before_its_anchors_begins_a_new_chain_too(
    before: Audited, earlier: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics of different moments: the anchors are there, what they signed is not."""
    monkeypatch.setattr(notary, "SETTLE_S", 0.5)
    await before.signed(4)
    await write(earlier.config, [one for one in await copied(before.log) if one.topic == ANCHORS or one.offset < 3])
    after = before.under(earlier)
    with pytest.raises(Terminal, match="ends before offset 4, up to which it was anchored"):
        await after.notary().once()
    found = await after.restored(after.key)
    place = f"sessions.v1/{topics.SESSIONS.partition_of('s')}"
    assert found.why == f"{place} ends at offset 3, it was anchored up to 3"
    assert (found.chain, found.rounds_lost) == (f"{after.settings.name}/r1", 0)
    assert await after.notary().once() == 3
    assert (await after.verified()).findings == []


async def test_nobody_without_the_key_begins_a_chain_and_an_old_record_changes_nothing(
    before: Audited, earlier: EventLog, tmp_path: Path
) -> None:
    """Else whoever may write to the broker could change records and have the log signed anew."""
    name, forger = before.settings.name, load_or_make_key(tmp_path / "forged.key")
    after = await rolled_back(before, earlier)
    await after.restored(after.key)
    assert await after.notary().once() == 4
    (genuine,) = [body async for body in bodies(after.log, ANCHORS) if isinstance(body, ChainBegun)]
    forged = msgspec.structs.replace(genuine, chain=f"{name}/r9", before=f"{name}/r1", key=forger.public)
    await after.log.append(ANCHORS, name, an_event(forged))
    await after.log.append(ANCHORS, name, an_event(msgspec.structs.replace(forged, key=genuine.key)))
    await after.log.append(ANCHORS, name, an_event(genuine))
    await after.signed(2)
    report = await after.verified()
    assert (report.deployment, len(report.given_up)) == (f"{name}/r1", 1)
    assert [one.kind for one in report.findings] == ["anchor", "anchor"]


async def test_the_command_does_it_and_says_so(
    before: Audited, earlier: EventLog, s3_config: dict[str, str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    after = await rolled_back(before, earlier)
    credentials = tmp_path / "keys.json"
    credentials.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    values = {
        "s3.endpoint": s3_config["endpoint"],
        "s3.bucket": s3_config["bucket"],
        "s3.credentials_file": credentials,
        "audit.bucket": BUCKET,
        "audit.name": after.settings.name,
        "audit.key_file": after.key_file,
    }
    cli = Cli(capsys, earlier.config)

    async def call(*command: str, **changes: object) -> Answer:
        given = {**values, **{name.replace("__", "."): value for name, value in changes.items()}}
        options = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
        return await asyncio.to_thread(cli, *command, "--data", tmp_path / "none", *options)

    chain = f"{after.settings.name}/r1"
    keyless = await call("restore", audit__key_file=tmp_path / "absent.key")
    assert keyless.code == 1 and f"--set audit.name={after.settings.name}-r1" in keyless.out
    done = await call("restore", "--reason", "disk")
    assert done.code == 0 and f"audit: began chain {chain} after {after.settings.name}: " in done.out
    assert await after.notary().once() == 4
    told = await call("audit", "verify")
    assert told.code == 0 and f"chain {chain} was begun by a restore at" in told.out and "(disk)" in told.out
