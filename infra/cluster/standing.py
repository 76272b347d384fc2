"""Actors of a deployment that outlive the command: started by `up`, found by `run` and `status`, ended by `down`.

Every function needs Ray to run already, joins it as a driver and leaves it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.cluster import actors
from odradek.infra.cluster.branch import on_its_branch
from odradek.infra.cluster.deployment import deployment_of
from odradek.infra.cluster.policy import check_history
from odradek.infra.cluster.session import STATE_TIMEOUT_S, Say
from odradek.infra.config.services import data_dir, endpoints
from odradek.infra.config.tree import Config
from odradek.infra.errors import Unreachable
from odradek.infra.observe.actors import ActorView, ActorWatcher, ray_ask
from odradek.infra.stack.ray_head import connect
from odradek.streams.admin import ensure_topics


def start(config: Config, say: Say) -> list[str]:
    """Start the actors that do not run yet; returns their names. If one does not come up, those that this call
    started are ended again."""
    deployment = deployment_of(config, endpoints(config))
    asyncio.run(ensure_topics(deployment.kafka, deployment.tenants))
    with _joined(config, deployment):
        missing = absent(deployment)
        if not missing:
            return []
        asyncio.run(check_history(config, deployment))
        deployment = asyncio.run(on_its_branch(deployment))
        try:
            actors.start(deployment, say)
        except BaseException:
            _end(deployment, missing)
            raise
        return missing


def stop(config: Config) -> list[str]:
    """End the deployment's actors; returns the names of those that ran."""
    deployment = deployment_of(config, endpoints(config))
    with _joined(config, deployment):
        return actors.stop(deployment)


@contextmanager
def attached(config: Config) -> Iterator[Deployment]:
    """A deployment whose services and actors run; `Unreachable`, with the command to run, if they do not."""
    deployment = deployment_of(config, endpoints(config))
    with _joined(config, deployment):
        missing = _missed(deployment)
        if missing:
            what = "the actors are" if len(missing) == len(actors.names(deployment)) else f"{missing[0]} is"
            raise Unreachable(f"{what} not running for {data_dir(config)}: run odradek up")
        yield deployment


def look(config: Config) -> list[ActorView]:
    """What every actor that ought to exist says of itself now, in starting order; empty if none was started."""
    deployment = deployment_of(config, endpoints(config))

    async def ask(names: list[str]) -> list[ActorView]:
        watcher = ActorWatcher(names, ray_ask(deployment.namespace))
        try:
            return await watcher.look(STATE_TIMEOUT_S)
        finally:
            await watcher.close()

    with _joined(config, deployment):
        started = absent(deployment) != actors.names(deployment)
        return asyncio.run(ask(actors.expected(deployment))) if started else []


def absent(deployment: Deployment) -> list[str]:
    """Names of the deployment's actors that do not exist, in starting order."""
    missing = []
    for name in actors.names(deployment):
        try:
            ray.get_actor(name, namespace=deployment.namespace)
        except ValueError:
            missing.append(name)
    return missing


def _missed(deployment: Deployment) -> list[str]:
    """The absent ones that a deployment needs."""
    return [name for name in absent(deployment) if name not in actors.OPTIONAL]


def _end(deployment: Deployment, names: list[str]) -> None:
    for name in reversed(names):
        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=deployment.namespace), no_restart=True)


@contextmanager
def _joined(config: Config, deployment: Deployment) -> Iterator[None]:
    connect(endpoints(config).ray, namespace=deployment.namespace)
    try:
        yield
    finally:
        ray.shutdown()
