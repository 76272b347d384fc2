"""The actors of a running deployment from outside: their processes, whether they are up, and code run inside one.

`inside` runs a function of this package in an actor's process (Ray's own `__ray_call__`): how tests arm a named fault
point or move a process's clock without any switch in the product. It lasts until that process ends.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, TypeVar

import ray
import ray.exceptions
from ray._private.state import state as ray_state

import support.crash.inside as inside_module
from odradek.infra.cluster.session import Running
from odradek.infra.stack import processes
from support.waiting import within

T = TypeVar("T")
CALL_S = 20.0
"""Seconds for a function inside an actor. A busy actor answers in well under one."""
ANSWER_S = 5.0
"""Seconds for an actor to say that it is there; then it is asked again."""
LOOK_S = 0.2
"""Seconds between two looks at an actor that is being started: each asks Ray."""


class Cluster:
    """Names to processes."""

    def __init__(self, running: Running) -> None:
        ray.cloudpickle.register_pickle_by_value(inside_module)  # type: ignore[no-untyped-call]
        self.deployment = running.deployment
        self.handles = running.handles
        self._ids = {name: handle._actor_id.hex() for name, handle in running.handles.items()}

    @property
    def names(self) -> list[str]:
        return sorted(self.handles)

    def pid(self, name: str) -> int | None:
        """Its process now; None while it is being started again."""
        row = ray_state.actor_table(self._ids[name])
        return int(row["Pid"]) if row and row["State"] == "ALIVE" and row["Pid"] else None

    async def up(self, name: str, seconds: float) -> int:
        """Its process, once it answers. Raises TimeoutError."""

        async def answering() -> int | None:
            pid = await asyncio.to_thread(self.pid, name)
            return pid if pid is not None and await self._answers(name) else None

        pid = await within(answering, seconds, LOOK_S)
        if pid is None:
            raise TimeoutError(f"{name} did not come up within {seconds:g} s")
        return pid

    async def _answers(self, name: str) -> bool:
        """Whether it does; false while it is being started or has just died again."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.handles[name].__ray_ready__.remote()
        except (TimeoutError, ray.exceptions.RayError):
            return False
        return True

    async def inside(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result, computed in the actor's process. Raises RayError or TimeoutError."""
        async with asyncio.timeout(CALL_S):
            result: T = await self.handles[name].__ray_call__.remote(lambda _self, *given: function(*given), *arguments)
            return result

    async def state(self, name: str) -> dict[str, Any]:
        """What the actor says of itself; empty if it does not answer."""
        try:
            async with asyncio.timeout(CALL_S):
                return dict(await self.handles[name].state.remote())
        except (ray.exceptions.RayError, TimeoutError):
            return {}


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process of ours; False if it is gone."""
    name = processes.name_of(pid)
    return name is not None and processes.send(name, number)


async def dead(pid: int, seconds: float) -> bool:
    """Whether the process ends within so many seconds."""
    return await within(lambda: processes.name_of(pid) is None, seconds)
