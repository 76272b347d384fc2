"""Apache Kafka in KRaft mode, one node: the log of the embedded stack.

Durable against the death of any process: a produced record is in the kernel's page cache before it is acknowledged.
Not durable against power loss of the one machine, which no single node without fsync on each write is. Topics are
never created by accident (auto-create is off) and nothing is deleted by age or size.

The broker runs in its folder and names what lies there relative to it: `server.properties` is read as Latin-1 and
`log.dirs` is split at commas, so an absolute path with an é or a comma put the log beside the data folder.
"""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from odradek.infra.errors import ComponentFailed, Unreachable
from odradek.infra.stack.component import Progress
from odradek.infra.stack.jars import ensure_jars
from odradek.infra.stack.java import find_java
from odradek.infra.stack.ports import LOOPBACK, answers
from odradek.infra.stack.processes import log_tail, spawn

HEAP_MB = 384
"""Broker heap. Below about 256 large fetches run out of memory; more is only resident memory."""

MAX_MESSAGE_BYTES = 10 * 1024 * 1024
"""Largest record batch. A session's largest inlined event must fit; above 256 KiB content is a blob anyway."""

INTERNAL_PARTITIONS = 8
"""Partitions of the offsets and transaction topics. 50, the default, costs start time and files on one node."""

SESSION_TIMEOUT_MS = 9_000
"""Broker heartbeat lease. A killed broker's successor waits for it; much lower fences a busy one-core machine."""

FORMAT_DEADLINE_S = 120.0
"""Seconds for formatting an empty log folder: one JVM start, 1.5 s on an idle machine, over 60 on one with load 17."""

_FIXED: dict[str, object] = {
    "process.roles": "broker,controller",
    "node.id": 1,
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "default.replication.factor": 1,
    "min.insync.replicas": 1,
    "offsets.topic.replication.factor": 1,
    "offsets.topic.num.partitions": INTERNAL_PARTITIONS,
    "offsets.retention.minutes": 2**31 - 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "transaction.state.log.num.partitions": INTERNAL_PARTITIONS,
    "share.coordinator.state.topic.replication.factor": 1,
    "share.coordinator.state.topic.min.isr": 1,
    "group.initial.rebalance.delay.ms": 0,
    "message.max.bytes": MAX_MESSAGE_BYTES,
    "replica.fetch.max.bytes": MAX_MESSAGE_BYTES,
    "log.retention.ms": -1,
    "log.retention.bytes": -1,
    "log.cleaner.dedupe.buffer.size": 32 * 1024 * 1024,
    "num.network.threads": 2,
    "num.io.threads": 4,
    "background.threads": 2,
    "num.recovery.threads.per.data.dir": 2,
    "broker.session.timeout.ms": SESSION_TIMEOUT_MS,
}

_ENVIRONMENT = {"LC_ALL": "C.UTF-8"}
"""In a POSIX locale Java cannot name a folder that is not ASCII, its own working directory included."""

_PROPERTIES = "server.properties"

_LOG4J = """status = error
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = OUT
appender.out.type = Console
appender.out.name = OUT
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %c{1}: %m%n
"""


class Kafka:
    """The broker of one data folder."""

    name = "kafka"
    port_names = ("broker", "controller")
    start_deadline_s = 180.0
    stop_grace_s = 20.0
    error_logs: Mapping[Path, Path] = MappingProxyType({})
    detaches = False

    def __init__(self, data: Path, cache: Path | None = None) -> None:
        self._folder = data / "kafka"
        self._cache = cache
        self._command: list[str] = []

    def address(self, ports: Mapping[str, int]) -> str:
        """The bootstrap address."""
        return f"{LOOPBACK}:{ports['broker']}"

    def properties(self, ports: Mapping[str, int]) -> str:
        """The whole `server.properties`."""
        broker = f"PLAINTEXT://{LOOPBACK}:{ports['broker']}"
        controller = f"{LOOPBACK}:{ports['controller']}"
        settings = {
            **_FIXED,
            "listeners": f"{broker},CONTROLLER://{controller}",
            "advertised.listeners": broker,
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": "logs",
        }
        return "".join(f"{key}={value}\n" for key, value in settings.items())

    def prepare(self, ports: Mapping[str, int], progress: Progress) -> None:
        """Java, jars, configuration, and a formatted log folder on the first start."""
        java = find_java()
        progress(self.name, f"Java {java.version} ({java.origin}), checking jars")
        jars = ensure_jars(self._cache)
        (self._folder / "tmp").mkdir(parents=True, exist_ok=True)
        (self._folder / "log4j2.properties").write_text(_LOG4J)
        (self._folder / _PROPERTIES).write_text(self.properties(ports))
        options = [f"-Xmx{HEAP_MB}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"]
        settings = ["-Dlog4j2.configurationFile=log4j2.properties", "-Djava.io.tmpdir=tmp"]
        self._command = [java.program, *options, *settings, "-cp", f"{jars}/*"]
        if not (self._folder / "logs" / "meta.properties").exists():
            progress(self.name, "formatting a new log folder")
            self._format()

    def _format(self) -> None:
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # With `=`: one id in 64 begins with a dash, which the tool would read as an option.
        command = [*self._command, "kafka.tools.StorageTool", "format", f"--cluster-id={cluster}", "-c", _PROPERTIES]
        log = self._folder / "format.log"
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=FORMAT_DEADLINE_S,
                    check=False,
                    cwd=self._folder,
                    env={**os.environ, **_ENVIRONMENT},
                )
            except subprocess.TimeoutExpired as error:
                raise ComponentFailed(f"kafka: formatting took over {FORMAT_DEADLINE_S:.0f} s; log: {log}") from error
        if done.returncode != 0:
            raise ComponentFailed(f"kafka: formatting failed (exit {done.returncode}): {log_tail(log)}; log: {log}")

    def start(self, ports: Mapping[str, int], mark: str, log: Path) -> subprocess.Popen[bytes]:
        """Start the broker."""
        command = [*self._command, "kafka.Kafka", _PROPERTIES]
        return spawn(command, mark=mark, log=log, cwd=self._folder, env=_ENVIRONMENT)

    def check(self, ports: Mapping[str, int], timeout_s: float) -> None:
        """A metadata request that names a live broker."""
        if not answers(ports["broker"], timeout_s):
            raise Unreachable(f"kafka: nothing listens on {self.address(ports)}")
        check_kafka(self.address(ports), timeout_s)

    def listens(self, ports: Mapping[str, int]) -> tuple[int | Path, ...]:
        """The broker."""
        return (ports["broker"],)

    def finish(self, ports: Mapping[str, int]) -> None:
        """Nothing: topics are made by the log's own admin step."""

    def clean(self, ports: Mapping[str, int]) -> None:
        """Nothing outside the data folder."""


def check_kafka(bootstrap: str, timeout_s: float, **security: object) -> int:
    """Ask any broker of `bootstrap` for its metadata; returns the number of live brokers, or raises `Unreachable`."""
    with ThreadPoolExecutor(1) as thread:  # callers may already run an event loop
        return thread.submit(lambda: asyncio.run(_metadata(bootstrap, timeout_s, security))).result()


async def _metadata(bootstrap: str, timeout_s: float, security: Mapping[str, object]) -> int:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    client = AIOKafkaAdminClient(
        bootstrap_servers=bootstrap,
        request_timeout_ms=max(1, int(timeout_s * 1000)),
        client_id="odradek-check",
        **security,
    )
    try:
        async with asyncio.timeout(timeout_s):
            await client.start()
            cluster = await client.describe_cluster()
        brokers = cluster["brokers"]
    except (KafkaError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(f"kafka: no metadata from {bootstrap} within {timeout_s:g} s: {reason}") from error
    finally:
        await client.close()
    if not brokers:
        raise Unreachable(f"kafka: {bootstrap} answers but has no live broker yet")
    return len(brokers)
