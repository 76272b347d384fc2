"""Restarts of an actor by a real Ray: one that cannot start again just now is started again later, not given up."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
from support.waiting import eventually_blocking

from odradek.actors.runtime.loop import LoopThread
from odradek.infra.stack.ray_head import connect

pytestmark = pytest.mark.contract
DEADLINE_S = 180.0


class Dependent:
    """An actor whose start needs something: a file says that it is away."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        LoopThread("dependent").begin(self._start(), 30)

    async def _start(self) -> None:
        with (self._folder / "starts").open("a") as starts:
            starts.write(f"{os.getpid()}\n")
        await asyncio.sleep(0)
        if (self._folder / "away").exists():
            raise ConnectionError("the broker is away")

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def started(ray_address: str, tmp_path: Path) -> Iterator[Any]:
    connect(ray_address)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor: Any = ray.remote(Dependent).options(num_cpus=0, max_restarts=-1, max_task_retries=0)
    yield actor
    ray.shutdown()


def test_an_actor_that_cannot_start_again_is_started_until_it_can(started: Any, tmp_path: Path) -> None:
    """Guarantee 12: else a broker that is away for a moment, while an actor restarts, ends that actor for ever."""
    handle = started.remote(tmp_path)
    first = ray.get(handle.pid.remote(), timeout=DEADLINE_S)
    (tmp_path / "away").touch()
    os.kill(first, signal.SIGKILL)
    starts = tmp_path / "starts"
    eventually_blocking(lambda: len(starts.read_text().split()) >= 3, "two starts while it is away", DEADLINE_S)
    (tmp_path / "away").unlink()

    def answers() -> bool:
        try:
            return bool(ray.get(handle.pid.remote(), timeout=DEADLINE_S) != first)
        except ray.exceptions.ActorUnavailableError:
            return False

    assert eventually_blocking(answers, "it to be back", DEADLINE_S)


def test_a_first_start_that_fails_says_why(started: Any, tmp_path: Path) -> None:
    (tmp_path / "away").touch()
    with pytest.raises(ray.exceptions.ActorDiedError, match="the broker is away"):
        ray.get(started.remote(tmp_path).pid.remote(), timeout=DEADLINE_S)
    assert len((tmp_path / "starts").read_text().split()) == 1


def test_what_ray_says_of_a_dead_actor_is_for_the_log_and_not_for_the_output(
    started: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A command's standard output is what the command prints: JSON stays JSON while actors die under it."""
    caplog.set_level(logging.INFO, "odradek.infra.stack.ray_head")
    handle = started.remote(tmp_path)
    os.kill(ray.get(handle.pid.remote(), timeout=DEADLINE_S), signal.SIGKILL)
    eventually_blocking(lambda: "died or was killed" in caplog.text, "Ray's word of the dead worker", DEADLINE_S)
    assert capfd.readouterr().out == ""
