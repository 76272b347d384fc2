"""Bugs planted in what people and auditors rely on: erasure and the notary's signatures. Each is caught.

As in `test_planted_bugs.py`, a bug replaces one decision of the product in this process only, and none of these is seen
by the product itself: `subject erase` says done, `audit verify` finds nothing or what the check finds too.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.crash.planted import Which, caught, read
from support.crash.world import World
from support.small_log import SmallLog

from odradek.streams import topics
from odradek.streams.audit import chain, notary
from odradek.streams.audit.anchors import Cursor
from odradek.streams.audit.keys import SigningKey, load_or_make_key
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.audit.verify import verify
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.errors import SubjectErased
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.log import EventLog
from odradek.streams.privacy import content
from odradek.streams.privacy.erasure import Erasure
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

Plant = Callable[[pytest.MonkeyPatch], None]
WORDS = "my-name-is-nobody-else's"


# -- erasure ----------------------------------------------------------------------------------------------------------


def makes_a_key_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late writer finds no key and makes one: the mark is not asked for."""
    monkeypatch.setattr(KeyFiles, "destroyed", lambda _self, _subject: False)


def forgets_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person says is taken for structure: written in plain, and missed by nobody who reads back."""
    fields = content._fields
    monkeypatch.setattr(content, "_fields", lambda kind: () if kind is MessageReceived else fields(kind))


READABLE: Which = ("erasure", "nothing_of_an_erased_subject_can_be_read")


async def erased(config: KafkaConfig, s3: S3Store, keys: Path, subject: str) -> World:
    """Somebody speaks, is erased, and an owner of their session that has not heard of it writes on."""

    async def says(log: EventLog, number: int) -> None:
        message = MessageReceived(message_id=f"{subject}/{number}", text=WORDS + subject)
        meta = Meta(origin="production", subject=subject)
        await SmallLog(log).append("sessions.v1", subject, message, subject, number, meta=meta)

    def deployment() -> EventLog:
        """As a process of its own has it."""
        ring = KeyRing(KeyFiles(keys))
        return EventLog(config, BlobStore(s3, prefix=f"{subject}/", keys=ring), ring)

    async with deployment() as log, deployment() as late:
        await says(log, 0)
        assert (await Erasure(log, log.blobs).run(subject)).done
        with contextlib.suppress(SubjectErased):
            await says(late, 1)
        world = await read(log, "sessions.v1", "subjects.v1", whose=subject)
    world.words = {subject: (WORDS + subject).encode()}
    return world


@pytest.mark.parametrize("plant", [makes_a_key_again, forgets_a_field])
async def test_words_of_an_erased_subject_that_can_be_read_are_caught(
    fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    store = S3Store(S3Config(**s3_config))
    assert READABLE not in caught(await erased(fresh_config, store, tmp_path, "ann"))
    plant(monkeypatch)
    assert READABLE in caught(await erased(fresh_config, store, tmp_path, "ben"))
    store.close()


# -- tamper evidence --------------------------------------------------------------------------------------------------


def leaves_headers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notary and verifier agree on hashes that say nothing of the headers."""
    leaf = chain.leaf_of

    def short(record: Record) -> bytes:
        return leaf(Record(record.ref, record.key_bytes, record.value, (), record.timestamp_ms))

    monkeypatch.setattr(chain, "leaf_of", short)
    monkeypatch.setattr(notary, "leaf_of", short)


def goes_on_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh notary leaves the first record behind its predecessor's anchor unsigned."""
    after = Cursor.after

    def further(anchor: AnchorWritten) -> Cursor:
        return replace(after(anchor), next=anchor.last + 2)

    monkeypatch.setattr(Cursor, "after", further)


SIGNED: Which = ("tamper evidence", "every_signature_stands_for_all_that_is_stored")


async def notarised(log: EventLog, s3: S3Config, key: SigningKey, name: str) -> World:
    """A notary signs what there is; after more was written to that partition, the next one goes on."""
    small, vault = SmallLog(log), Vault(s3, settings := AuditSettings(name=name, lock_days=1))
    for first in (0, 3):
        for number in range(first, first + 3):
            await small.append("sessions.v1", "one", MessageReceived(message_id=f"{number}", text="x"), name, number)
        await notary.Notary(log, vault, key, settings).once()
    report = await verify(log, vault, name, {key.public})
    world = await read(log, *topics.BY_NAME)
    world.altered = [str(finding) for finding in report.findings]
    vault.close()
    return world


@pytest.mark.parametrize("plant", [leaves_headers_out, goes_on_one_too_far])
async def test_a_notary_that_does_not_sign_all_is_caught(
    fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    s3 = S3Config(**{**s3_config, "bucket": f"signed-{uuid.uuid4().hex[:10]}"})
    key = load_or_make_key(tmp_path / "key")
    async with EventLog(fresh_config) as log:
        assert not {which for which in caught(await notarised(log, s3, key, "sound")) if which[0] == SIGNED[0]}
        plant(monkeypatch)
        assert SIGNED in caught(await notarised(log, s3, key, "planted"))
