"""Fixtures and contract classes for tests of this room and of third-party stores.

Import the fixtures into a test module (`from odradek.streams.testing import kafka_config, event_log`); they need a
`kafka_bootstrap` fixture with the address of a real broker.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiokafka.admin import AIOKafkaAdminClient

from odradek.streams import admin
from odradek.streams.blobs import ObjectStore
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import BlobMissing
from odradek.streams.events.meta import Meta
from odradek.streams.log import EventLog

_prepared: dict[str, KafkaConfig] = {}
"""Topics are created once a module: a broker in a test has little memory, and each partition takes some."""


@pytest_asyncio.fixture
async def kafka_config(kafka_bootstrap: str, request: pytest.FixtureRequest) -> KafkaConfig:
    """A deployment of its own for the test module, with every declared topic. Keys keep its tests apart."""
    module = request.module.__name__
    if module not in _prepared:
        config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
        await admin.ensure_topics(config)
        _prepared[module] = config
    return _prepared[module]


@pytest_asyncio.fixture
async def fresh_config(kafka_bootstrap: str) -> AsyncIterator[KafkaConfig]:
    """A deployment of its own for one test, gone after it."""
    config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
    await admin.ensure_topics(config)
    yield config
    await _forget(config)


async def _forget(config: KafkaConfig) -> None:
    """Deletes a test's topics; only tests may, so this is not part of `admin`."""
    client = AIOKafkaAdminClient(**config.client_options())
    await client.start()
    try:
        ours = [name for name in await client.list_topics() if name.startswith(config.name(""))]
        await client.delete_topics(ours)
    finally:
        await client.close()


@pytest_asyncio.fixture
async def event_log(kafka_config: KafkaConfig) -> AsyncIterator[EventLog]:
    """An open EventLog on `kafka_config`."""
    async with EventLog(kafka_config) as log:
        yield log


@pytest.fixture
def key() -> str:
    """A key that no other test uses."""
    return f"key-{uuid.uuid4().hex[:10]}"


def an_event(body: Any, *cause: str | int, meta: Meta | None = None) -> Event[Any]:
    """An event as a test writes it."""
    return Event.of(body, id=event_id("test", *(cause or (uuid.uuid4().hex,))), source="test", meta=meta)


class ObjectStoreContract:
    """What every ObjectStore promises. Subclass with a `store` fixture."""

    async def test_what_is_put_is_got(self, store: ObjectStore, key: str) -> None:
        data = bytes(range(256)) * 5
        assert await store.put_if_absent(key, data) is True
        assert await store.get(key) == data
        assert await store.exists(key) is True

    async def test_the_first_conditional_put_wins(self, store: ObjectStore, key: str) -> None:
        assert await store.put_if_absent(key, b"first") is True
        assert await store.put_if_absent(key, b"second") is False
        assert await store.get(key) == b"first"

    async def test_of_many_conditional_puts_at_once_one_wins(self, store: ObjectStore, key: str) -> None:
        won = await asyncio.gather(*(store.put_if_absent(key, b"%d" % number) for number in range(8)))
        assert sum(won) == 1
        assert await store.get(key) == b"%d" % won.index(True)

    async def test_put_replaces(self, store: ObjectStore, key: str) -> None:
        await store.put(key, b"one")
        await store.put(key, b"two")
        assert await store.get(key) == b"two"

    async def test_a_missing_object_is_a_typed_error_that_names_it(self, store: ObjectStore, key: str) -> None:
        assert await store.exists(key) is False
        with pytest.raises(BlobMissing, match=key):
            await store.get(key)

    async def test_list_is_by_prefix_and_sorted(self, store: ObjectStore, key: str) -> None:
        for name in ("b", "a", "c/d"):
            await store.put(f"{key}/{name}", b"x")
        await store.put(f"{key}-other", b"x")
        assert await store.list(f"{key}/") == [f"{key}/a", f"{key}/b", f"{key}/c/d"]

    async def test_remove_takes_all_of_a_prefix_and_nothing_else(self, store: ObjectStore, key: str) -> None:
        for name in (f"{key}/a", f"{key}/b/c", f"{key}-other"):
            await store.put(name, b"x")
        removal = await store.remove(f"{key}/")
        assert (removal.removed, removal.kept) == (2, [])
        assert await store.list(key) == [f"{key}-other"]
        assert (await store.remove(f"{key}/")).removed == 0

    async def test_an_empty_object_is_an_object(self, store: ObjectStore, key: str) -> None:
        assert await store.put_if_absent(key, b"") is True
        assert await store.get(key) == b""
