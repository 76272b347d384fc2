"""A deployment that is up inside a block: services, topics, actors; and down again, in reverse, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.cluster import actors
from odradek.infra.cluster.branch import Branch, on_its_branch
from odradek.infra.cluster.deployment import deployment_of
from odradek.infra.cluster.policy import check_history, checked
from odradek.infra.config.services import endpoints, stack_of
from odradek.infra.config.tree import Config
from odradek.infra.stack.ray_head import connect
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import owned
from odradek.infra.telemetry import TELEMETRY
from odradek.streams.admin import ensure_topics

Say = Callable[[str], None]

STATE_TIMEOUT_S = 5.0
"""Seconds an actor may take to say how it is. Too low loses actors that are merely busy; too high delays a look."""


@dataclass(frozen=True, slots=True)
class Running:
    """What is up."""

    deployment: Deployment
    handles: dict[str, Any]

    async def states(self) -> dict[str, dict[str, Any]]:
        """By name what each actor says of itself. One that is restarting, or does not answer in time, is absent."""

        async def ask(name: str, handle: Any) -> tuple[str, dict[str, Any] | None]:
            try:
                async with asyncio.timeout(STATE_TIMEOUT_S):
                    return name, await handle.state.remote()
            except (ray.exceptions.RayError, TimeoutError):
                return name, None

        asked = [ask(name, handle) for name, handle in self.handles.items() if not name.startswith("session-")]
        return {name: state for name, state in await asyncio.gather(*asked) if state is not None}


@contextmanager
def deployment_up(config: Config, say: Say, *, keep: bool = False, branch: Branch | None = None) -> Iterator[Running]:
    """Start what does not run yet; stop what this call started, unless `keep`. Raises `UsageError` before anything is
    started where the policy can't be served or another run has the data folder, and before an actor is where `branch`
    can't begin."""
    checked(config)
    stack = stack_of(config)
    with owned(stack.data, "a run"), _deployment_up(config, stack, say, keep, branch) as running:
        yield running


@contextmanager
def _deployment_up(config: Config, stack: Stack, say: Say, keep: bool, branch: Branch | None) -> Iterator[Running]:
    started = bool(stack.up(lambda component, message: say(f"{component}: {message}")).started)
    try:
        deployment = deployment_of(config, endpoints(config))
        asyncio.run(ensure_topics(deployment.kafka, deployment.tenants))
        asyncio.run(check_history(config, deployment))
        deployment = asyncio.run(on_its_branch(deployment, branch))
        connect(endpoints(config).ray, namespace=deployment.namespace)
        ours = not any(actors.exists(name, deployment.namespace) for name in actors.names(deployment))
        try:
            handles = actors.start(deployment, say)
            state = ray.get(handles[TELEMETRY].state.remote(), timeout=actors.START_DEADLINE_S)
            say(f"metrics at {state['address']}")
            yield Running(deployment, handles)
        finally:
            if ours and not keep:
                say("stopping actors")
                actors.stop(deployment)
            ray.shutdown()
    finally:
        if started and not keep:
            say("stopping services")
            stack.down(lambda component, message: say(f"{component}: {message}"))
