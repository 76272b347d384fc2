"""The actors of a deployment as named, detached Ray actors: a fixed set, restarted by Ray, never retried by it.

Guarantees: starting twice gives the same actors; `max_restarts=-1` brings a killed one back; `max_task_retries=0`,
since a retried call would run a tool invisibly twice; `stop` ends every actor of the namespace and waits for that.
Order: what others look up by name at their start comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions

from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.light import light
from odradek.infra.errors import InfraError
from odradek.infra.telemetry import TELEMETRY

START_DEADLINE_S = 120.0
"""Seconds for one actor to come up (importing torch takes 5 on an idle core, far more while others start)."""
CALLS = 1000
"""Calls that an actor takes at once beside those of rollouts. Too low: people's sessions wait for rollouts' calls;
too high: nothing, each is one small object."""
STOP_DEADLINE_S = 20.0
"""Seconds for the actors to go away."""

OPTIONAL = frozenset({"projections", "notary", TELEMETRY})
"""Actors that a deployment works without."""

SERVING = ("actors.inference.serving", "ServingActor", "sample", "cancel", "state")
TRAINER = ("actors.trainer.actor", "TrainerActor", "state")
"""The actors that import torch: module, class and methods."""

Progress = Callable[[str], None]


def _environment(deployment: Deployment, name: str) -> Any:
    from odradek.actors.environment.actor import EnvironmentActor

    return EnvironmentActor, (deployment, name)


def _inference(deployment: Deployment, name: str) -> Any:
    return light(*SERVING), (deployment, name)


def _session(deployment: Deployment, name: str) -> Any:
    from odradek.actors.session.actor import SessionActor

    return SessionActor, (deployment, name)


def _reward(deployment: Deployment, name: str) -> Any:
    from odradek.actors.reward.actor import RewardActor

    return RewardActor, (deployment, name)


def _assembler(deployment: Deployment, name: str) -> Any:
    from odradek.actors.assembler.actor import AssemblerActor

    return AssemblerActor, (deployment, name)


def _trainer(deployment: Deployment, name: str) -> Any:
    return light(*TRAINER), (deployment, name)


def _projections(deployment: Deployment, name: str) -> Any:
    from odradek.actors.projections.actor import ProjectionsActor

    return ProjectionsActor, (deployment, name)


def _notary(deployment: Deployment, name: str) -> Any:
    from odradek.actors.notary.actor import NotaryActor

    return NotaryActor, (deployment, name)


def _controller(deployment: Deployment, _name: str) -> Any:
    from odradek.actors.controller.actor import ControllerActor

    return ControllerActor, (deployment,)


def _telemetry(deployment: Deployment, _name: str) -> Any:
    from odradek.infra.telemetry.actor import TelemetryActor

    return TelemetryActor, (deployment, [name for name in names(deployment) if name != TELEMETRY])


def plan(deployment: Deployment) -> list[list[tuple[str, Callable[[Deployment, str], Any]]]]:
    """The actors in waves: those of one wave start together."""
    return [
        [
            *((("notary", _notary),) if deployment.audit.enabled else ()),
            ("environment-0", _environment),
            *((f"inference-{i}", _inference) for i in range(deployment.inference_actors)),
            *((f"reward-{i}", _reward) for i in range(deployment.reward_actors)),
            ("assembler", _assembler),
            ("trainer", _trainer),
            *((("projections", _projections),) if deployment.projections else ()),
        ],
        [(f"session-{i}", _session) for i in range(deployment.session_actors)],
        [("controller", _controller), (TELEMETRY, _telemetry)],
    ]


def names(deployment: Deployment) -> list[str]:
    """Every actor's name, in starting order."""
    return [name for wave in plan(deployment) for name, _ in wave]


def expected(deployment: Deployment) -> list[str]:
    """Those that ought to answer now: all but the optional ones that nobody started (the demo has no projections)."""
    return [name for name in names(deployment) if name not in OPTIONAL or exists(name, deployment.namespace)]


def start(deployment: Deployment, progress: Progress = lambda _text: None) -> dict[str, Any]:
    """Start what does not run yet; returns handles by name once every actor has answered.

    Raises InfraError naming the first actor that did not come up.
    """
    handles: dict[str, Any] = {}
    for wave in plan(deployment):
        progress(f"starting {', '.join(name for name, _ in wave)}")
        started = {name: _get_or_create(deployment, name, make) for name, make in wave}
        for name, handle in started.items():
            _await_up(name, handle)
            progress(f"{name} is up")
        handles.update(started)
    return handles


def calls_at_once(deployment: Deployment) -> int:
    """More than rollouts can make: each has one call under way at an actor, and may have one that it gave up."""
    return CALLS + 2 * deployment.max_sessions


def _get_or_create(deployment: Deployment, name: str, make: Callable[[Deployment, str], Any]) -> Any:
    try:
        return ray.get_actor(name, namespace=deployment.namespace)
    except ValueError:
        kind, arguments = make(deployment, name)
        options = {
            "name": name,
            "namespace": deployment.namespace,
            "lifetime": "detached",
            "num_cpus": 0,
            "max_restarts": -1,
            "max_task_retries": 0,
            "max_concurrency": calls_at_once(deployment),
        }
        return ray.remote(kind).options(**options).remote(*arguments)


def _await_up(name: str, handle: Any) -> None:
    """`__ray_ready__` answers once the constructor has returned."""
    try:
        ray.get(handle.__ray_ready__.remote(), timeout=START_DEADLINE_S)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise InfraError(f"actor {name} did not come up: {reason}") from error


def stop(deployment: Deployment) -> list[str]:
    """End the deployment's actors; returns the names of those that ran. The environment goes last of those that work,
    so that what still closes can close; the notary after it, so that it signs what they all wrote."""
    ended = []
    for name in reversed(names(deployment)):
        try:
            handle = ray.get_actor(name, namespace=deployment.namespace)
        except ValueError:
            continue
        if name.startswith(("environment", "reward", "projections", "notary", TELEMETRY)):
            _shut_down(handle)
        ray.kill(handle, no_restart=True)
        ended.append(name)
    deadline = time.monotonic() + STOP_DEADLINE_S
    while any(exists(name, deployment.namespace) for name in ended) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ended


def _shut_down(handle: Any) -> None:
    """Let an actor that holds sandboxes end them itself; if it can't answer, its host's reaper takes them."""
    try:
        ray.get(handle.shut_down.remote(), timeout=STOP_DEADLINE_S)
    except ray.exceptions.RayError:
        return


def exists(name: str, namespace: str) -> bool:
    """Whether an actor of that name was started and not ended."""
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True
