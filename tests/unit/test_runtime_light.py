"""Stand-ins of actors that compute: the same methods, and no torch where only a handle is held."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
import subprocess
import sys

import pytest
from ray import cloudpickle

from odradek.actors.runtime.light import light
from odradek.infra.cluster.actors import SERVING, TRAINER

ASKED = """
import sys
from odradek.infra.cluster import actors, deployment, session, standing
from odradek.infra.telemetry import actor
from odradek.actors.session import actor
from odradek.actors.controller import actor
from odradek.actors.runtime.light import light
from ray import cloudpickle
for one in (actors.SERVING, actors.TRAINER):
    cloudpickle.loads(cloudpickle.dumps(light(*one)))
print(sorted({"torch", "triton"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("described", [SERVING, TRAINER], ids=lambda described: described[1])
def test_a_stand_in_has_the_name_and_the_public_methods_of_the_real_one(described: tuple[str, ...]) -> None:
    module, name, *methods = described
    real = getattr(importlib.import_module(f"odradek.{module}"), name)
    public = {member for member, _ in inspect.getmembers(real, inspect.iscoroutinefunction) if member[0] != "_"}
    assert set(methods) == public
    stand_in = light(*described)
    assert stand_in.__name__ == name
    assert all(inspect.iscoroutinefunction(getattr(stand_in, method)) for method in methods)


def test_torch_is_imported_only_where_it_computes() -> None:
    """Whoever starts, asks or follows the actors holds handles of all of them: half a gigabyte each, for nothing."""
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "[]\n"


async def test_calls_reach_the_real_actor_also_after_it_travelled() -> None:
    kind = pickle.loads(cloudpickle.dumps(light("actors.runtime.light", "Real", "double")))
    module = importlib.import_module("odradek.actors.runtime.light")

    class Real:
        def __init__(self, start: int) -> None:
            self.start = start

        async def double(self, more: int) -> int:
            await asyncio.sleep(0)
            return 2 * (self.start + more)

    module.Real = Real  # type: ignore[attr-defined]
    try:
        assert await kind(3).double(4) == 14
    finally:
        del module.Real  # type: ignore[attr-defined]
