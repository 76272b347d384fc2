"""Real services for tests: one broker and one store for a whole pytest session, or ones that already run.

`tests/conftest.py` registers the fixtures for the whole tree. A person (or CI) who already has them running sets
`ODRADEK_TEST_KAFKA=host:port`, `ODRADEK_TEST_S3` (JSON: endpoint, access_key, secret_key, bucket, region) or
`ODRADEK_TEST_RAY=host:port`; then that one is not started. Tests share the services, so each takes a prefix of its own:
`topic_prefix`, `s3_prefix`.

Nothing is left: an interrupted session stops what it started (`stop_as_on_interrupt`), and what a killed one could not
stop, the next one stops before it starts anything.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from odradek.infra.config.services import reap_sandboxes
from odradek.infra.errors import InfraError, UsageError
from odradek.infra.stack.component import Component
from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.ray_head import LOOPBACK_ENV, RayHead
from odradek.infra.stack.s3 import S3Access, S3Keys
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import owned

log = logging.getLogger(__name__)

KAFKA_VARIABLE = "ODRADEK_TEST_KAFKA"
S3_VARIABLE = "ODRADEK_TEST_S3"
RAY_VARIABLE = "ODRADEK_TEST_RAY"


PREFIX = "odrt-"
"""How folders of `scratch` begin, in the temporary folder. Short: socket paths are limited to 107 characters."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A short temporary folder, removed at the end with whatever lies in it. Before, what sessions that were killed
    left in theirs is ended and removed."""
    end_abandoned()
    hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    with owned(hidden, "a test session"):
        folder = hidden.rename(hidden.with_name(hidden.name[1:]))  # seen by others only once it is owned
        data = folder / "d"
        data.mkdir()
        try:
            yield data
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def end_abandoned() -> list[Path]:
    """End and remove what lies in folders whose session is gone, as `down` does for a data folder; returns them. One
    that can't be ended is left, with a warning."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with ExitStack() as stack:
            try:
                stack.enter_context(owned(folder, "the end of a killed test session"))
            except (UsageError, OSError):  # it lives, or is somebody else's
                continue
            try:
                for state in [*folder.glob("d/state.json"), *folder.glob("d/*/state.json")]:
                    _down(state.parent)
            except InfraError as error:
                log.warning("%s, left by a killed test session: %s", folder, error)
                continue
            shutil.rmtree(folder, ignore_errors=True)
            found.append(folder)
    return found


def _down(data: Path) -> None:
    Stack(data, (Kafka(data), Seaweed(data), RayHead(data)), reap=lambda: reap_sandboxes(data)).down()


def stop_as_on_interrupt() -> None:
    """SIGTERM and SIGHUP end this process in order, as Ctrl-C does, also where a shell that started it in the
    background ignores SIGINT. Once: whoever ends a group of processes often sends twice. SIGHUP stays ignored under
    `nohup`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(_number: int, _frame: object) -> None:
        for number in numbers:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which commands started from here would inherit
        signal.raise_signal(signal.SIGINT)

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, stop)


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
