"""Real services for tests: one broker and one store for a whole pytest session, or ones that already run.

`tests/conftest.py` registers the fixtures for the whole tree. A person (or CI) who already has them running sets
`ODRADEK_TEST_KAFKA=host:port`, `ODRADEK_TEST_S3` (JSON: endpoint, access_key, secret_key, bucket, region) or
`ODRADEK_TEST_RAY=host:port`; then that one is not started. Tests share the services, so each takes a prefix of its own:
`topic_prefix`, `s3_prefix`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from odradek.infra.stack.component import Component
from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.ray_head import LOOPBACK_ENV, RayHead
from odradek.infra.stack.s3 import S3Access, S3Keys
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import Stack

KAFKA_VARIABLE = "ODRADEK_TEST_KAFKA"
S3_VARIABLE = "ODRADEK_TEST_S3"
RAY_VARIABLE = "ODRADEK_TEST_RAY"


@contextmanager
def scratch() -> Iterator[Path]:
    """A short temporary folder (socket paths are limited to 107 characters), removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="odr-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def running(data: Path, *components: Component) -> Iterator[Stack]:
    """A stack that is up inside the block and leaves nothing behind it."""
    stack = Stack(data, components)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="session")
def kafka_bootstrap() -> Iterator[str]:
    """Bootstrap address of a real broker."""
    given = os.environ.get(KAFKA_VARIABLE)
    if given:
        yield given
        return
    with scratch() as data, running(data, Kafka(data)) as stack:
        yield stack.address("kafka")


@pytest.fixture(scope="session")
def s3_access() -> Iterator[S3Access]:
    """Endpoint, bucket and keys of a real S3 store; `odradek.infra.stack.s3.s3_client(access)` makes a client."""
    given = os.environ.get(S3_VARIABLE)
    if given:
        values = json.loads(given)
        keys = S3Keys(values["access_key"], values["secret_key"])
        yield S3Access(values["endpoint"], values["bucket"], values["region"], keys)
        return
    with scratch() as data:
        store = Seaweed(data)
        with running(data, store) as stack:
            yield store.access(stack.address("s3"))


@pytest.fixture(scope="session")
def s3_config(s3_access: S3Access) -> dict[str, str]:
    """The same as plain values: endpoint, access_key, secret_key, bucket, region."""
    assert s3_access.endpoint is not None
    assert s3_access.keys is not None
    return {
        "endpoint": s3_access.endpoint,
        "access_key": s3_access.keys.access_key,
        "secret_key": s3_access.keys.secret_key,
        "bucket": s3_access.bucket,
        "region": s3_access.region,
    }


@pytest.fixture(scope="session")
def s3_endpoint(s3_config: dict[str, str]) -> str:
    """Only the endpoint URL."""
    return s3_config["endpoint"]


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """Address of a real Ray head, for `odradek.infra.stack.ray_head.connect`."""
    given = os.environ.get(RAY_VARIABLE)
    if given:
        yield given
        return
    os.environ.update(LOOPBACK_ENV)
    with scratch() as data, running(data, RayHead(data)) as stack:
        yield stack.address("ray")


@pytest.fixture
def s3_prefix() -> str:
    """A key prefix that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}/"


@pytest.fixture
def topic_prefix() -> str:
    """A prefix that no other test uses, for topics, groups and transactional ids."""
    return f"t{uuid.uuid4().hex[:10]}."
