"""Consent and erasure as the log has them: what stands, what a reader may pass over, and what keeps whole from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from odradek.streams import topics
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import SubjectErased, UnknownEventType
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.events.subjects import ConsentGranted, ConsentWithdrawn, ErasureRequested
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
SUBJECTS = topics.SUBJECTS.name


def test_without_a_grant_to_train_nobody_is_trained_on() -> None:
    consents = Consents()
    assert not consents("ann") and not consents("")
    consents.apply(0, ConsentGranted(subject="ann", scope="show"))
    consents.apply(1, ConsentGranted(subject=""))
    assert not consents("ann") and not consents(""), "another scope allows nothing, and nobody's name is no subject"
    consents.apply(2, ConsentGranted(subject="ann"))
    consents.apply(3, ConsentWithdrawn(subject="ann", scope="show"))
    assert consents("ann") and not consents("ben") and consents.offset == 4
    consents.apply(4, ConsentWithdrawn(subject="ann"))
    assert not consents("ann")
    consents.apply(5, ConsentGranted(subject="ann"))
    consents.apply(6, ErasureRequested(subject="ann", request_id="r"))
    consents.apply(7, ConsentGranted(subject="ann"))
    assert not consents("ann"), "erasure is for ever"


@pytest.mark.contract
async def test_what_cannot_be_decoded_changes_no_consent_and_an_unknown_type_stops_the_reader(
    fresh_config: KafkaConfig,
) -> None:
    """It may be a new way to withdraw: who does not know it must not go on training."""
    async with EventLog(fresh_config) as log:
        await log.append(SUBJECTS, "ann", an_event(ConsentGranted(subject="ann")))
        await log.append_raw(SUBJECTS, b"ann", b"no event", [("ce_type", b"consent.withdrawn.v1")])
        consents = Consents()
        await consents.refresh(log)
        assert consents("ann") and consents.offset == 2
        await log.append_raw(SUBJECTS, b"ann", b"\x80", [("ce_type", b"consent.suspended.v1")])
        with pytest.raises(UnknownEventType):
            await consents.refresh(log)
        earlier = Consents()
        await earlier.refresh(log, 2)
        assert earlier("ann") and earlier.offset == 2, "what a batch of that time relied on can still be told"


@pytest.mark.contract
async def test_an_event_of_an_erased_subject_keeps_what_is_written_with_it_from_the_log(
    fresh_config: KafkaConfig, tmp_path: Path
) -> None:
    ring = KeyRing(KeyFiles(tmp_path / "keys"))
    await ring.destroy("ann", "asked")
    said = [an_event(MessageReceived(message_id=who, text="hello"), meta=Meta(subject=who)) for who in ("ben", "ann")]
    async with EventLog(fresh_config, keys=ring) as log:
        with pytest.raises(SubjectErased):
            await log.append_many("sessions.v1", [("s", event) for event in said])
    async with EventLog(fresh_config) as log:  # closing the first one sent whatever it still held
        assert await log.high_water("sessions.v1", topics.SESSIONS.partition_of("s")) == 0
