"""The Faust worker that keeps the tables live. One worker an application; projections only; no side effects.

What Faust does not do by itself, and this file does (DESIGN §4): read committed records (its consumer thread reads
uncommitted ones without exactly-once, which it cannot be trusted with), have the topics created beforehand, catch
errors inside agents (an exception would skip and commit the event), keep the web server off, stop at a type that a
newer release wrote (tables without it would be wrong, and its offset is not committed: a build that knows it goes on
there). Delivery is at least once; the offset inside each row makes repetition harmless.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any, NoReturn

import faust
import msgspec
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from faust.transport.drivers.aiokafka import AIOKafkaConsumerThread, Consumer, Transport

from odradek.streams import clients
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.errors import Terminal, UnknownEventType
from odradek.streams.events.meta import RecordRef
from odradek.streams.polling import mark_foreign
from odradek.streams.projections.tables import FAULT_SUFFIX, STANDS_STILL, TABLES, Rows, Table
from odradek.streams.projections.views import snapshot

logger = logging.getLogger(__name__)

APP = "projections.v1"
SESSION_S = 8.0
"""Seconds without a heartbeat after which a dead worker's partitions are free. The design allows 6 to 10."""
SNAPSHOT_S = 1.0
"""Seconds between snapshots. Too low: CPU for views nobody looks at. Too high: `odradek watch` lags."""
COMMIT_S = 1.0
"""Seconds between commits of source offsets: what is repeated after a crash."""


class CommittedThread(AIOKafkaConsumerThread):
    """Faust's consumer thread, reading committed records only."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._isolation_level = "read_committed"
        return consumer


class CommittedConsumer(Consumer):
    """Uses `CommittedThread`."""

    def _new_consumer_thread(self) -> CommittedThread:
        return CommittedThread(self, loop=self.loop, beacon=self.beacon)


class CommittedTransport(Transport):
    """Uses `CommittedConsumer`."""

    Consumer = CommittedConsumer


class ProjectionsApp(faust.App):
    """A Faust application on `CommittedTransport`."""

    def _new_transport(self) -> CommittedTransport:
        return CommittedTransport(self.conf.broker_consumer, self)


def changelog(config: KafkaConfig, table: Table[Any]) -> str:
    """The topic that holds a table's rows between two runs of the worker."""
    return f"{config.name(APP)}-{table.name}-changelog"


async def ensure_changelogs(config: KafkaConfig) -> None:
    """Creates the changelog topics; each has the partitions of its table's source."""
    client = AIOKafkaAdminClient(**config.client_options())
    await clients.start(config, client)
    try:
        async with clients.guarded(config, "creating changelogs", APP, config.request_timeout_s):
            wanted = [
                NewTopic(
                    changelog(config, table),
                    table.topic.partitions,
                    config.replication,
                    topic_configs={"cleanup.policy": "compact", "min.insync.replicas": str(config.min_insync)},
                )
                for table in TABLES
            ]
            response = await client.create_topics(wanted)
            for name, code, *_ in response.topic_errors:
                if code and kafka.for_code(code) is not kafka.TopicAlreadyExistsError:
                    raise Terminal(f"creating {name}: {kafka.for_code(code).__name__}", topic=name)
    finally:
        await clients.stop(client)


def create_app(config: KafkaConfig, data: Path, snapshot_file: Path | None = None) -> tuple[faust.App, dict[str, Rows]]:
    """The application with its agents, not started, and its tables by name."""
    broker = ";".join(f"kafka://{address}" for address in config.bootstrap.split(","))
    options: dict[str, Any] = {}
    if config.security_protocol != "PLAINTEXT":
        options["broker_credentials"] = _credentials(config)
    app = ProjectionsApp(
        config.name(APP),
        broker=broker,
        store="memory://",
        datadir=str(data),
        key_serializer="raw",
        value_serializer="raw",
        web_enabled=False,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=SESSION_S,
        broker_heartbeat_interval=SESSION_S / 4,
        broker_commit_interval=COMMIT_S,
        processing_guarantee="at_least_once",
        **options,
    )
    fault_file = None if snapshot_file is None else snapshot_file.with_suffix(FAULT_SUFFIX)
    tables: dict[str, Rows] = {table.name: _with_agent(app, config, table, fault_file) for table in TABLES}
    if snapshot_file is not None:
        _with_snapshots(app, tables, snapshot_file)
    return app, tables


def _credentials(config: KafkaConfig) -> Any:
    context: Any = config.client_options().get("ssl_context")
    if config.security_protocol.startswith("SASL"):
        return faust.SASLCredentials(
            username=config.sasl_username,
            password=config.sasl_password,
            mechanism=config.sasl_mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context=context)


def _with_agent(app: faust.App, config: KafkaConfig, table: Table[Any], fault_file: Path | None) -> Rows:
    """The Faust table and the agent that feeds it."""
    rows: Any = app.Table(table.name, partitions=table.topic.partitions, key_type=bytes, value_type=bytes, default=None)
    source = app.topic(
        config.name(table.topic.name), key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
    )

    async def feed(stream: Any) -> AsyncIterable[None]:
        async for event in stream.events():
            try:
                table.step(rows, _record(config, table, event.message))
            except UnknownEventType as error:
                _stand_still(f"table {table.name} stands still: {error}", fault_file)
            except Exception:
                # Anything thrown from here would make Faust skip the event and commit it. A table is rebuilt at will;
                # an alarm and a row that is behind are better than a worker in a restart loop.
                logger.exception("table %s failed on %s", table.name, event.message.offset)
            yield None

    app.agent(source, name=f"{app.conf.id}.{table.name}", concurrency=1)(feed)
    return rows  # type: ignore[no-any-return]


def _stand_still(why: str, fault_file: Path | None) -> NoReturn:
    """Ends the worker before the event is committed, as a kill would: Faust itself can only go on."""
    logger.error(why)
    if fault_file is not None:
        fault_file.write_text(why)
    logging.shutdown()
    os._exit(STANDS_STILL)


def _record(config: KafkaConfig, table: Table[Any], message: Any) -> Record:
    record = Record(
        ref=RecordRef(topic=table.topic.name, partition=message.partition, offset=message.offset),
        key_bytes=message.key,
        value=message.value,
        headers=tuple(message.headers or ()),
        timestamp_ms=int((message.timestamp or 0) * 1000),
    )
    mark_foreign(config, record)
    return record


def _with_snapshots(app: faust.App, tables: dict[str, Rows], path: Path) -> None:
    """A timer that replaces the snapshot file whole, so that a reader never sees half of one."""

    @app.timer(interval=SNAPSHOT_S)  # type: ignore[untyped-decorator]
    async def write_snapshot() -> None:
        data = msgspec.json.encode(snapshot({name: dict(rows.items()) for name, rows in tables.items()}))
        await asyncio.to_thread(_replace, path, data)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(data)
    fresh.replace(path)
