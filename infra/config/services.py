"""From the configuration to the services: which are embedded, which are elsewhere, and how to reach them all.

The one place that knows both tree and stack. `stack_of` plans; `endpoints` tells where things are once they run.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from odradek.infra.config.tree import Config
from odradek.infra.deadline import Deadline
from odradek.infra.errors import StackError
from odradek.infra.stack import kafka as kafka_service
from odradek.infra.stack.component import Component
from odradek.infra.stack.processes import POLL_S
from odradek.infra.stack.ray_head import RayHead, check_ray
from odradek.infra.stack.s3 import S3Access, S3Keys, check_s3
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import External, Stack
from odradek.streams.config import KafkaConfig, KeyStoreAddress

REAP_DEADLINE_S = 20.0
"""Seconds for sandboxes of a driver that has just ended to go away. Removing a large workspace takes a few."""

AWS = "aws"
"""Value of s3.endpoint for the provider's own endpoints."""


class Endpoints(msgspec.Struct, frozen=True):
    """Where everything is. Holds no secret of the store: `s3_credentials_file` names the file."""

    kafka: KafkaConfig
    s3_endpoint: str
    """Empty: the provider's own."""
    s3_bucket: str
    s3_region: str
    s3_credentials_file: str
    """Empty: the usual AWS chain."""
    ray: str
    """Empty where a command does without."""


def data_dir(config: Config) -> Path:
    """The data folder, `~` expanded."""
    return Path(config.data.dir).expanduser().absolute()


def key_store(config: Config) -> KeyStoreAddress:
    """Where subjects' keys lie."""
    section = config.privacy
    folder = Path(section.keys).expanduser().absolute() if section.keys else data_dir(config) / "keys"
    return KeyStoreAddress(folder=str(folder), kms_key=section.kms_key or "", kms_region=section.kms_region)


def kafka_config(config: Config, bootstrap: str) -> KafkaConfig:
    """The log's settings for the given brokers."""
    section = config.kafka
    return KafkaConfig(
        bootstrap=bootstrap,
        prefix=section.prefix,
        security_protocol=section.security_protocol,
        ca_file=section.ca_file or "",
        sasl_mechanism=section.sasl_mechanism or "",
        sasl_username=section.sasl_username or "",
        sasl_password=section.sasl_password or "",
        replication=section.replication,
        min_insync=section.min_insync,
        connect_timeout_s=section.connect_timeout_s,
        foreign_types=tuple(name for name in section.foreign_types.split(",") if name),
    )


class ExternalKafka:
    """Configured brokers."""

    name = "kafka"

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self.address = config.bootstrap

    def check(self, timeout_s: float) -> None:
        """A metadata request with the configured security."""
        options = self._config.client_options()
        for known in ("bootstrap_servers", "request_timeout_ms"):
            options.pop(known)
        kafka_service.check_kafka(self.address, min(timeout_s, self._config.connect_timeout_s), **options)


class ExternalS3:
    """A configured store."""

    name = "s3"

    def __init__(self, config: Config) -> None:
        section = config.s3
        self.address = section.endpoint or AWS
        self._file = Path(section.credentials_file).expanduser() if section.credentials_file else None
        self._endpoint = None if section.endpoint in (None, AWS) else section.endpoint
        self._bucket, self._region = section.bucket, section.region

    def check(self, timeout_s: float) -> None:
        """A signed request for the bucket."""
        keys = S3Keys.read(self._file) if self._file else None
        check_s3(S3Access(self._endpoint, self._bucket, self._region, keys), timeout_s)


class ExternalRay:
    """A configured cluster."""

    name = "ray"

    def __init__(self, address: str) -> None:
        self.address = address

    def check(self, timeout_s: float) -> None:
        """Ray's own health check."""
        check_ray(self.address, timeout_s)


def stack_of(config: Config) -> Stack:
    """The stack that this configuration asks for: nothing embedded is planned for a configured address."""
    data = data_dir(config)
    embedded: list[Component] = []
    external: list[External] = []
    if config.kafka.bootstrap is None:
        embedded.append(kafka_service.Kafka(data))
    else:
        external.append(ExternalKafka(kafka_config(config, config.kafka.bootstrap)))
    if config.s3.endpoint is None:
        embedded.append(Seaweed(data, config.s3.bucket))
    else:
        external.append(ExternalS3(config))
    if config.ray.address is None:
        embedded.append(RayHead(data, config.ray.logical_cpus))
    else:
        external.append(ExternalRay(config.ray.address))
    return Stack(data, embedded, external, reap=lambda: reap_sandboxes(data))


def reap_sandboxes(data: Path, wait_s: float = REAP_DEADLINE_S) -> int:
    """End and remove what dead sandbox drivers of this data folder left; returns how many sandboxes that were.

    A driver's helper cleans up by itself when the driver dies, so a lock still held is waited for.
    """
    from odradek.actors.environment.ns.instance import reap_dead

    deadline = Deadline(wait_s)
    reaped = 0
    while states := {lock.parent for lock in (data / "sandboxes").glob("*/ns-*.lock")}:
        reaped += sum(reap_dead(state) for state in states)
        if deadline.expired and any((data / "sandboxes").glob("*/ns-*.lock")):
            raise StackError(
                f"sandboxes below {data / 'sandboxes'} are still in use by a live driver, or hold a process that "
                f"nothing ends: end that first"
            )
        time.sleep(POLL_S)
    return reaped


def endpoints(config: Config, *, ray: bool = True) -> Endpoints:
    """Where all services are now; `Unreachable`, with the command to run, if one of them is down. Without `ray`, log
    and store are enough."""
    stack = stack_of(config)
    found = stack.addresses(("kafka", "s3", "ray") if ray else ("kafka", "s3"))
    if config.s3.endpoint is None:
        credentials = str(Seaweed(data_dir(config)).keys_file)
    else:
        credentials = str(Path(config.s3.credentials_file).expanduser()) if config.s3.credentials_file else ""
    return Endpoints(
        kafka=kafka_config(config, found["kafka"]),
        s3_endpoint="" if found["s3"] == AWS else found["s3"],
        s3_bucket=config.s3.bucket,
        s3_region=config.s3.region,
        s3_credentials_file=credentials,
        ray=found.get("ray", ""),
    )
