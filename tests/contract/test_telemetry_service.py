"""The telemetry thread against a real broker: a page that grows with the log, spans of what is new, and an end."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest
from support.collector import collecting
from support.run_log import small_run
from support.waiting import eventually

from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.clients import KafkaJournal
from odradek.actors.session.ports import Outgoing
from odradek.actors.telemetry import identity
from odradek.actors.telemetry.tracing import Tracing
from odradek.infra.telemetry.service import TelemetryService
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardUngraded
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, Usage
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config as fresh_config

pytestmark = pytest.mark.contract


def deployment(kafka: KafkaConfig, endpoint: str) -> Deployment:
    return Deployment(
        kafka=kafka,
        store=ObjectStoreAddress(endpoint="", bucket=""),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=1, attempts=2, max_staleness=1),
        data_dir="",
        tokenizer_file="",
        warm_start_dir="",
        otlp_endpoint=endpoint,
    )


async def no_one(name: str) -> Mapping[str, Any]:
    raise ConnectionError(name)


async def test_the_page_follows_the_log_and_batches_are_traced(fresh_config: KafkaConfig) -> None:
    def page() -> str:
        return urllib.request.urlopen(address, timeout=10).read().decode()

    with collecting() as collector:
        service = TelemetryService(deployment(fresh_config, collector.endpoint), ["trainer"], no_one)
        address = service.start()
        try:
            await eventually(lambda: "odradek_steps_total 0.0" in page(), "the first picture")
            async with EventLog(fresh_config) as event_log:
                await small_run(versions=2).write(event_log)
            await eventually(lambda: "odradek_steps_total 2.0" in page(), "the steps")
            await eventually(lambda: 'odradek_rewards_total{verdict="assigned"} 56.0' in page(), "the rewards")
            text = page()
        finally:
            service.stop()
        assert 'odradek_actor_up{actor="trainer"} 0.0' in text
        assert 'odradek_sessions_ended_total{end="done",origin="rl"} 32.0' in text
        assert sorted(span.name for span in collector.spans) == [
            "assemble batch 0", "assemble batch 1", "train step 1", "train step 2"
        ]  # fmt: skip
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


async def test_a_broker_that_is_not_there_stops_nothing(fresh_config: KafkaConfig) -> None:
    nowhere = KafkaConfig(bootstrap="127.0.0.1:9", connect_timeout_s=0.5)
    service = TelemetryService(deployment(nowhere, ""), [], no_one)
    address = service.start()
    try:
        assert (await asyncio.to_thread(urllib.request.urlopen, address, timeout=10)).status == 200
    finally:
        service.stop()
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


async def test_the_trace_travels_in_kafka_headers_to_whoever_reads_the_session(fresh_config: KafkaConfig) -> None:
    """Owner's journal -> broker -> reward actor's grading: a child of the session's root span in another process."""
    with collecting() as collector:
        owner, grader = Tracing.of(collector.endpoint, "session-0"), Tracing.of(collector.endpoint, "reward-0")
        async with EventLog(fresh_config) as event_log:
            journal = KafkaJournal(event_log, "session-0", owner.traceparent)
            opened = SessionOpened(session_id="s", policy="demo", group_id="g")
            end = SessionCompleted(reason="done", first_offset=0, usage=Usage())
            outgoing = [Outgoing("e0", Meta(), opened), Outgoing("e1", Meta(epoch=0, seq=0), end)]
            refs = await journal.append("s", outgoing)
            for body in (opened, end):
                assert owner.observe is not None
                owner.observe("s", body)
            header = (await event_log.read_ref(refs[-1])).event.traceparent
        verdict = RewardUngraded(
            session_id="s", group_id="g", partition=0, first_offset=0, last_offset=1, grader="g", grader_version="1",
            cause="x",
        )  # fmt: skip
        grader.grading(header, verdict, 1)
        for tracing in (owner, grader):
            await asyncio.to_thread(tracing.close)
    root, grading = collector.named("session")[0], collector.named("grading")[0]
    assert header == identity.traceparent("s")
    assert (grading.trace_id, grading.parent_span_id) == (root.trace_id, root.span_id)


async def test_without_an_endpoint_no_record_carries_a_header(fresh_config: KafkaConfig) -> None:
    async with EventLog(fresh_config) as event_log:
        journal = KafkaJournal(event_log, "session-0", Tracing.of("", "session-0").traceparent)
        refs = await journal.append("s", [Outgoing("e0", Meta(), SessionOpened(session_id="s", policy="demo"))])
        assert (await event_log.read_ref(refs[0])).event.traceparent is None
