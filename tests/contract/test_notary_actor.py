"""The notary as an actor: it anchors by itself, says how far it is, and stops where the log is not what it signed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.structs import TopicPartition
from support.waiting import eventually

from odradek.actors.notary.access import own_keys, vault_of
from odradek.actors.notary.actor import NotaryActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.streams import topics
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.verify import verify
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.sessions import MessageReceived
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

PATIENCE_S = 60.0


@pytest.fixture
def deployment(fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path) -> Deployment:
    credentials = tmp_path / "credentials.json"
    credentials.write_bytes(msgspec.json.encode({name: s3_config[name] for name in ("access_key", "secret_key")}))
    return Deployment(
        kafka=fresh_config,
        store=ObjectStoreAddress(
            endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(credentials)
        ),
        lane=LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1),
        data_dir=str(tmp_path),
        tokenizer_file="",
        warm_start_dir="",
        audit=AuditSettings(
            name=fresh_config.prefix,
            interval_s=0.1,
            key_file=str(tmp_path / "notary.key"),
            bucket=f"audit-actor-{uuid.uuid4().hex[:8]}",
            lock_days=1,
        ),
    )


@contextmanager
def running(deployment: Deployment) -> Iterator[NotaryActor]:
    actor = NotaryActor(deployment, "notary")
    try:
        yield actor
    finally:
        actor._loop.stop()


async def test_it_anchors_by_itself_and_stops_up_where_the_log_is_not_what_it_signed(deployment: Deployment) -> None:
    async with EventLog(deployment.kafka) as log:
        for number in range(3):
            event = an_event(MessageReceived(message_id=f"m{number}", text="hello"))
            await log.append("sessions.v1", "s", event)
        with running(deployment) as actor:

            async def anchored() -> bool:
                state = await actor.state()
                assert not state["fault"]
                return bool(state["anchored"] == 3 and not state["waiting_records"] and not state["not_kept"])

            await eventually(anchored, "three anchored records", PATIENCE_S)
            assert (await actor.state())["locked"] is True
        vault = vault_of(deployment.store, deployment.audit)
        await vault.open()
        report = await verify(log, vault, deployment.audit.name, own_keys(deployment.audit))
        assert (report.ok, report.verified) == (True, 3)

        name = topics.AUDIT_ANCHORS.name
        end = await log.stable_end(name, 0)
        admin = AIOKafkaAdminClient(**deployment.kafka.client_options())
        await admin.start()
        await admin.delete_records({TopicPartition(deployment.kafka.name(name), 0): RecordsToDelete(end)})
        await admin.close()
        with running(deployment) as actor:

            async def stopped() -> bool:
                return bool((await actor.state())["fault"])

            await eventually(stopped, "the notary's fault", PATIENCE_S)
            assert "audit.anchors.v1 lacks round 0 of" in (await actor.state())["fault"]


async def test_one_that_is_shut_down_leaves_nothing_unanchored(deployment: Deployment) -> None:
    seldom = msgspec.structs.replace(deployment.audit, interval_s=3600)
    deployment = msgspec.structs.replace(deployment, audit=seldom)
    async with EventLog(deployment.kafka) as log:
        with running(deployment) as actor:

            async def resumed() -> bool:
                return bool((await actor.state())["rounds"] == 0)

            await eventually(resumed, "the notary's start", PATIENCE_S)
            await log.append("sessions.v1", "s", an_event(MessageReceived(message_id="m", text="hello")))
            await actor.shut_down()
        vault = vault_of(deployment.store, seldom)
        await vault.open()
        report = await verify(log, vault, seldom.name, own_keys(seldom))
        assert (report.ok, report.verified, report.not_anchored, report.not_kept) == (True, 1, 0, 0)
