"""What the commands on the log share: an open EventLog by the configuration, needing only the broker.

Not a command of its own. Object store and Ray may be down: what is published, listed, rebuilt or exported lies on the
log.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from odradek.infra.cli.context import Context
from odradek.infra.config.services import data_dir, kafka_config, key_store
from odradek.infra.config.tree import Config
from odradek.streams.config import KafkaConfig

if TYPE_CHECKING:
    from odradek.streams.log import EventLog

T = TypeVar("T")
Say = Callable[[str], None]

SAY_AFTER_S = 1.0
"""Seconds of silence after which a command says what it waits for."""
SAY_EVERY_S = 5.0
"""Seconds between two lines of progress."""


def broker(config: Config) -> KafkaConfig:
    """Where the log is; `Unreachable`, with the command to run, if nothing is configured and nothing runs."""
    if config.kafka.bootstrap is not None:
        return kafka_config(config, config.kafka.bootstrap)
    from odradek.infra.stack.kafka import Kafka
    from odradek.infra.stack.stack import Stack

    data = data_dir(config)
    return kafka_config(config, Stack(data, [Kafka(data)], []).addresses(("kafka",))["kafka"])


@asynccontextmanager
async def opened_log(context: Context, *, create: bool = False) -> AsyncIterator[EventLog]:
    """An EventLog, with the keys of subjects. `create` makes missing topics first: for commands that write before any
    actor ran."""
    from odradek.streams.admin import ensure_topics
    from odradek.streams.log import EventLog
    from odradek.streams.privacy.ring import key_ring

    config = broker(context.config)
    if create:
        await ensure_topics(config, context.config.kafka.tenant_names)
    async with EventLog(config, keys=key_ring(key_store(context.config))) as event_log:
        yield event_log


async def store_trees(context: Context, trees: Sequence[bytes]) -> None:
    """Put workspaces that tasks refer to into the object store; without any, no store is needed."""
    if not trees:
        return
    from odradek.actors.runtime.store import blobs_of
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import endpoints

    blobs = blobs_of(deployment_of(context.config, endpoints(context.config, ray=False)))
    for tree in trees:
        await blobs.put(tree)


def run(context: Context, what: str, work: Callable[[Say], Coroutine[Any, Any, T]]) -> T:
    """Run a command's coroutine. If it takes longer than a moment, say what it is doing, and go on saying how far it
    is: `work` is given a function that takes its latest state, told at most every `SAY_EVERY_S`. Told from a thread:
    what takes longest on a busy machine is an import, and that holds up the event loop."""
    latest = [f"{what} …"]

    def tell(state: str) -> None:
        latest[0] = f"{what}: {state}"

    ended = threading.Event()

    def told() -> None:
        wait = SAY_AFTER_S
        while not ended.wait(wait):
            context.say(latest[0])
            wait = SAY_EVERY_S

    teller = threading.Thread(target=told, name="progress", daemon=True)
    teller.start()
    try:
        return asyncio.run(work(tell))
    finally:
        ended.set()
        teller.join()
