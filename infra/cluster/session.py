"""A deployment that is up inside a block: services, topics, actors; and down again, in reverse, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.cluster import actors
from odradek.infra.cluster.deployment import deployment_of
from odradek.infra.config.services import endpoints, stack_of
from odradek.infra.config.tree import Config
from odradek.infra.stack.ray_head import connect
from odradek.streams.admin import ensure_topics

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Running:
    """What is up."""

    deployment: Deployment
    handles: dict[str, Any]


@contextmanager
def deployment_up(config: Config, say: Say, *, keep: bool = False) -> Iterator[Running]:
    """Start what does not run yet; stop what this call started, unless `keep`."""
    stack = stack_of(config)
    started = bool(stack.up(lambda component, message: say(f"{component}: {message}")).started)
    try:
        deployment = deployment_of(config, endpoints(config))
        asyncio.run(ensure_topics(deployment.kafka))
        connect(endpoints(config).ray, namespace=deployment.namespace)
        try:
            yield Running(deployment, actors.start(deployment, say))
        finally:
            if not keep:
                say("stopping actors")
                actors.stop(deployment)
            ray.shutdown()
    finally:
        if started and not keep:
            say("stopping services")
            stack.down(lambda component, message: say(f"{component}: {message}"))
