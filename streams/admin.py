"""Creates the declared topics and refuses drift. Idempotent; run once at deployment (`odradek up` does it).

It never changes or deletes what exists: a topic in another shape than declared is `TopicDrift`, for a person to settle.
"""

import asyncio
from collections.abc import Iterable

import msgspec
from aiokafka import errors as kafka
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from odradek.streams import clients, topics
from odradek.streams.clients import MAX_RECORD_BYTES
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import DeadlineExceeded, TopicDrift, UnknownTopic
from odradek.streams.topics import Cleanup, Topic

READY_S = 20.0
"""Seconds until created topics must have leaders. Too low: a slow first start fails. Too high: a broken one hangs."""


class Difference(msgspec.Struct, frozen=True):
    """One setting of one topic that is not as declared."""

    topic: str
    setting: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} expected {self.expected}, found {self.found}"


def declared_settings(row: Topic, config: KafkaConfig) -> dict[str, str]:
    """The broker-side settings of a row."""
    settings = {
        "min.insync.replicas": str(config.min_insync),
        "max.message.bytes": str(MAX_RECORD_BYTES + 64 * 1024),
        "message.timestamp.type": "CreateTime",
        "compression.type": row.compression or "producer",
    }
    if row.cleanup is Cleanup.KEEP:
        return settings | {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
    return settings | {"cleanup.policy": "compact"}


def _wanted(tenants: Iterable[str]) -> dict[str, Topic]:
    """Every topic that must exist, by bare name."""
    rows = {row.name: row for row in topics.ALL}
    for tenant in tenants:
        rows |= {row.for_tenant(tenant): row for row in topics.ALL if row.per_tenant}
    return rows


async def ensure_topics(config: KafkaConfig, tenants: Iterable[str] = ()) -> list[str]:
    """Creates what is missing, checks what exists, and returns the bare names it created. Safe to run at any time and
    by several processes at once."""
    wanted = _wanted(tenants)
    client = AIOKafkaAdminClient(**config.client_options())
    await clients.start(config, client)
    try:
        async with clients.guarded(config, "creating topics", "", config.request_timeout_s + READY_S):
            existing = set(await client.list_topics())
            missing = [name for name in wanted if config.name(name) not in existing]
            await _create(client, config, {name: wanted[name] for name in missing})
            await _until_ready(client, config, missing)
            differences = await _differences(client, config, {n: r for n, r in wanted.items() if n not in missing})
    finally:
        await clients.stop(client)
    if differences:
        raise TopicDrift(
            "topics differ from the declared table: "
            + "; ".join(map(str, differences))
            + ". Settle them by hand (kafka-configs.sh), or use another prefix",
            differences=[str(one) for one in differences],
        )
    return missing


async def existing(config: KafkaConfig) -> list[str]:
    """Bare names of the declared topics that are on the broker, tenants' copies included, sorted."""
    client = AIOKafkaAdminClient(**config.client_options())
    await clients.start(config, client)
    try:
        async with clients.guarded(config, "listing topics", "", config.request_timeout_s):
            names = [config.bare(name) for name in await client.list_topics() if name.startswith(config.name(""))]
    finally:
        await clients.stop(client)
    return sorted(name for name in names if _is_declared(name))


async def cluster_id(config: KafkaConfig) -> str:
    """The broker's own name for its cluster: another one, or one that was made anew, has another."""
    client = AIOKafkaAdminClient(**config.client_options())
    await clients.start(config, client)
    try:
        async with clients.guarded(config, "describing the cluster", "", config.request_timeout_s):
            return str((await client.describe_cluster())["cluster_id"])
    finally:
        await clients.stop(client)


def _is_declared(bare: str) -> bool:
    try:
        topics.declared(bare)
    except UnknownTopic:
        return False
    return True


async def _create(client: AIOKafkaAdminClient, config: KafkaConfig, rows: dict[str, Topic]) -> None:
    if not rows:
        return
    fresh = [
        NewTopic(config.name(name), row.partitions, config.replication, topic_configs=declared_settings(row, config))
        for name, row in rows.items()
    ]
    response = await client.create_topics(fresh)
    for name, code, *detail in response.topic_errors:
        if code and kafka.for_code(code) is not kafka.TopicAlreadyExistsError:
            raise TopicDrift(
                f"creating {name}: {kafka.for_code(code).__name__}: {detail[0] if detail else ''}", topic=name
            )


async def _until_ready(client: AIOKafkaAdminClient, config: KafkaConfig, names: list[str]) -> None:
    """A created topic is usable only when each partition has a leader."""
    pending = {config.name(name) for name in names}
    clock = asyncio.get_running_loop()
    deadline = clock.time() + READY_S
    while pending:
        for described in await client.describe_topics(sorted(pending)):
            leaders = [one["leader"] for one in described["partitions"]]
            if described["error_code"] == 0 and leaders and min(leaders) >= 0:
                pending.discard(described["topic"])
        if pending and clock.time() > deadline:
            raise DeadlineExceeded(f"topics without a leader after {READY_S:g} s: {', '.join(sorted(pending))}")
        if pending:
            await asyncio.sleep(0.1)


async def _differences(client: AIOKafkaAdminClient, config: KafkaConfig, rows: dict[str, Topic]) -> list[Difference]:
    if not rows:
        return []
    by_full = {config.name(name): (name, row) for name, row in rows.items()}
    found: list[Difference] = []
    for described in await client.describe_topics(list(by_full)):
        name, row = by_full[described["topic"]]
        count = len(described["partitions"])
        if count != row.partitions:
            found.append(Difference(name, "partitions", str(row.partitions), str(count)))
        copies = min((len(one["replicas"]) for one in described["partitions"]), default=0)
        if copies != config.replication:
            found.append(Difference(name, "replication", str(config.replication), str(copies)))
    resources = [ConfigResource(ConfigResourceType.TOPIC, full) for full in by_full]
    for response in await client.describe_configs(resources):
        for _, _, _, full, entries in response.resources:
            name, row = by_full[full]
            actual = {entry[0]: entry[1] for entry in entries}
            for setting, expected in declared_settings(row, config).items():
                if actual.get(setting) != expected:
                    found.append(Difference(name, setting, expected, str(actual.get(setting))))
    return sorted(found, key=str)
