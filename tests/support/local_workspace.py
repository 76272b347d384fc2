"""A workspace that is a directory of this host, without isolation: tools are tested on it without a sandbox.

It keeps every rule of `actors/tools/workspace.py` about paths, stdin, time-outs and process trees, so that a tool can't
tell it from a sandbox; but its commands are this user's processes on this machine. A process that leaves its group
(`setsid`) is out of its reach, which a sandbox's is not.
"""

from __future__ import annotations

import os
from pathlib import Path

from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.tools.errors import NoSuchJob
from odradek.actors.tools.workspace import Entry, Exit, FileStat, JobStatus, OnOutput
from support.beneath import Beneath
from support.local_processes import BackgroundJob, LocalProcesses


class LocalWorkspace:
    """Implements `Workspace` over `root`; `close` ends every process it started and that still runs."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._files = Beneath(self._root, self._root)
        self._processes = LocalProcesses(self._root)
        self._jobs: dict[str, BackgroundJob] = {}

    @property
    def mount(self) -> str:
        return self._root

    async def read(self, path: str, max_bytes: int) -> bytes:
        try:
            return self._files.read(path, max_bytes)
        except OSError as error:
            raise self._fault(path, error) from error

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        try:
            self._files.write(path, content, mode)
        except OSError as error:
            raise self._fault(path, error) from error

    async def stat(self, path: str) -> FileStat | None:
        try:
            return self._files.stat(path)
        except OSError as error:
            raise self._fault(path, error) from error

    async def list(self, path: str) -> list[Entry]:
        try:
            return self._files.list(path)
        except OSError as error:
            raise self._fault(path, error) from error

    async def exec(self, command: str, timeout_s: float, on_output: OnOutput) -> Exit:
        try:
            return await self._processes.run(command, timeout_s, on_output)
        except OSError as error:
            raise self._fault("a command", error) from error

    async def start_job(self, command: str) -> str:
        try:
            job = await self._processes.start(command)
        except OSError as error:
            raise self._fault("a background command", error) from error
        name = str(len(self._jobs) + 1)
        self._jobs[name] = job
        return name

    async def poll_job(self, job: str) -> JobStatus:
        return await self._job(job).poll()

    async def stop_job(self, job: str) -> JobStatus:
        return await self._job(job).stop()

    async def close(self) -> None:
        """End what still runs; the files stay."""
        for job in self._jobs.values():
            await job.stop()
        self._processes.end_left_behind()

    def _job(self, job: str) -> BackgroundJob:
        found = self._jobs.get(job)
        if found is None:
            raise NoSuchJob(f"no job {job[:40]!r}; background jobs do not survive a restart of the workspace")
        return found

    def _fault(self, what: str, error: OSError) -> SandboxInfraError:
        return SandboxInfraError(f"workspace {self._root}: {what}: {error.strerror or error}")
