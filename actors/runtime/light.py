"""An actor's class that imports the real one only where the actor lives.

Ray loads the class of an actor in every process that holds a handle of it. An actor that computes brings torch: five
seconds and half a gigabyte in each session actor, in the metrics page and in the command that started them all. So
such an actor is created by a stand-in with the same name and methods; a test holds that the methods are the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable
from typing import Any


def light(module: str, name: str, *methods: str) -> type:
    """The stand-in of `odradek.MODULE.NAME`, whose public async methods are `methods`."""

    def construct(self: Any, *arguments: Any) -> None:
        real = getattr(importlib.import_module(f"odradek.{module}"), name)
        self.actor = real(*arguments)

    members = {"__init__": construct, "__doc__": f"See odradek.{module}.{name}."}
    return type(name, (), members | {method: _passed_on(method) for method in methods})


def _passed_on(method: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: Any, *arguments: Any) -> Any:
        return await getattr(self.actor, method)(*arguments)

    call.__name__ = method
    return call
