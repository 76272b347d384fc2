"""Keeps one Faust worker running: live tables of groups, rewards, curriculum and utilisation.

The worker is a process of its own, because Faust takes over the event loop and the signals of the process it runs in.
Owns that process and nothing else: tables are rebuildable from the log, so a dead worker is simply started again; not
one that met what a newer release wrote, which `state` says instead.
The merged views are replaced every second in `SNAPSHOT` under the deployment's data folder; `views` reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.streams.projections.tables import FAULT_SUFFIX, STANDS_STILL

log = logging.getLogger(__name__)

SNAPSHOT = "projections.json"
RESTART_PAUSE_S = 2.0
"""Seconds before a worker that ended is started again. Too low burns CPU on a worker that cannot start."""
STOP_S = 10.0
"""Seconds a worker may take to end on SIGTERM before it is killed."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the kernel ends the worker when the thread that started it is gone."""

_LIBC = ctypes.CDLL(None)
"""Loaded before the fork: nothing but the call itself happens between fork and exec."""


class ProjectionsActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._folder = Path(deployment.data_dir) / "projections"
        self._kafka = deployment.kafka
        self._worker: asyncio.subprocess.Process | None = None
        self._starts = 0
        self._fault = ""
        self._loop = LoopThread(name)
        self._loop.main(self._run(), name)

    async def state(self) -> dict[str, Any]:
        """Whether the worker runs, how often it was started, and its last snapshot."""
        worker = self._worker
        return {
            "running": worker is not None and worker.returncode is None,
            "starts": self._starts,
            "snapshot": str(self._folder / SNAPSHOT),
            "fault": self._fault,
        }

    async def shut_down(self) -> None:
        """End the worker."""
        await self._loop.call(self._stop())

    async def _run(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = self._folder / "kafka.json"
        settings.touch(mode=0o600)
        settings.write_bytes(msgspec.json.encode(self._kafka))
        while True:
            self._starts += 1
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "odradek.streams.projections",
                "--config",
                str(settings),
                "--data",
                str(self._folder / "faust"),
                "--snapshot",
                str(self._folder / SNAPSHOT),
                stdin=asyncio.subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )
            code = await self._worker.wait()
            if code == STANDS_STILL:
                self._fault = (self._folder / SNAPSHOT).with_suffix(FAULT_SUFFIX).read_text()
                log.error(self._fault)
                return
            log.warning("the projections worker ended with %s; starting it again", code)
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _stop(self) -> None:
        worker = self._worker
        if worker is None or worker.returncode is not None:
            return
        worker.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await worker.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()


def _end_with_parent() -> None:
    """In the worker, before it starts: die with this actor's loop thread, which lives as long as the actor."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
