"""The workspace of a live sandbox: the tools' protocol in terms of the sandbox driver's.

Translates, and decides only whose fault a refusal is: a path the driver refuses is the call's (`ToolError`), everything
else is the environment's and passes through as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from odradek.actors.environment.errors import SandboxGoneError, SandboxNotFoundError, SandboxPathError
from odradek.actors.environment.protocol import WORKSPACE, ExecRequest, ExecResult, Sandbox
from odradek.actors.environment.protocol import FileStat as SandboxStat
from odradek.actors.environment.protocol import JobStatus as SandboxJobStatus
from odradek.actors.tools.errors import NoSuchFile, NoSuchJob, PathRefused, TooLarge, ToolError, WrongKind
from odradek.actors.tools.paths import relative
from odradek.actors.tools.workspace import Entry, Exit, FileStat, JobStatus, Kind, OnOutput

JOB_SECONDS = 3600.0
"""Longest life of a background job. Too low: a dev server dies under the agent; the sandbox's own lifetime still ends
it."""

_KINDS: dict[str, Kind] = {"file": "file", "dir": "directory", "symlink": "link"}


class SandboxWorkspace:
    """Implements `Workspace` over one sandbox, for the owner of `epoch`."""

    def __init__(self, sandbox: Sandbox, epoch: int = 0) -> None:
        self._sandbox = sandbox
        self._epoch = epoch

    @property
    def mount(self) -> str:
        return WORKSPACE

    async def read(self, path: str, max_bytes: int) -> bytes:
        inside = relative(path, WORKSPACE)
        with _refusals(path):
            content = await self._sandbox.read(inside, limit=max_bytes + 1)
        if len(content) > max_bytes:
            raise TooLarge(f"{path} has more than {max_bytes} bytes; use run_terminal to read a part of it")
        return content

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        inside = relative(path, WORKSPACE)
        if inside == ".":
            raise WrongKind(f"{path} is a directory")
        with _refusals(path):
            await self._sandbox.write(await self._real_parent(inside), content, mode=mode)

    async def _real_parent(self, path: str) -> str:
        """The path with the links to its directory resolved: the driver makes no new file behind any link, though one
        behind a link to an inside directory is harmless. A link in the last place is still the driver's to judge."""
        parent, _, name = path.rpartition("/")
        if not parent:
            return path
        try:
            real = (await self._sandbox.stat(parent)).path
        except SandboxPathError:
            return path
        return f"{real}/{name}" if real else name

    async def stat(self, path: str) -> FileStat | None:
        inside = relative(path, WORKSPACE)
        try:
            with _refusals(path):
                found = await self._sandbox.stat(inside)
        except NoSuchFile:
            return None
        return FileStat(_KINDS.get(found.kind, "other"), found.size, found.mode)

    async def list(self, path: str) -> list[Entry]:
        inside = relative(path, WORKSPACE)
        with _refusals(path):
            found = await self._sandbox.list(inside)
        return sorted((_entry(item) for item in found), key=lambda entry: entry.name)

    async def exec(self, command: str, timeout_s: float, on_output: OnOutput) -> Exit:
        request = ExecRequest(shell=command or ":", timeout_s=timeout_s, merge_output=True, epoch=self._epoch)
        ended: ExecResult | None = None
        async for item in self._sandbox.exec_stream(request):
            if isinstance(item, ExecResult):
                ended = item
            else:
                on_output(item.text)
        if ended is None:
            raise SandboxGoneError(f"sandbox {self._sandbox.sandbox_id}: a command's stream ended without its result")
        return Exit(None, timed_out=True) if ended.timed_out else Exit(ended.exit_code)

    async def start_job(self, command: str) -> str:
        request = ExecRequest(shell=command or ":", timeout_s=JOB_SECONDS, merge_output=True, epoch=self._epoch)
        return await self._sandbox.start_job(request)

    async def poll_job(self, job: str) -> JobStatus:
        with _no_job(job):
            return _job_status(await self._sandbox.poll_job(job))

    async def stop_job(self, job: str) -> JobStatus:
        with _no_job(job):
            return _job_status(await self._sandbox.stop_job(job))


def _entry(item: SandboxStat) -> Entry:
    return Entry(item.path.rsplit("/", 1)[-1], _KINDS.get(item.kind, "other"), item.size)


def _job_status(status: SandboxJobStatus) -> JobStatus:
    code = None if status.running else status.exit_code
    return JobStatus(status.output, status.running, code, status.truncated)


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    try:
        yield
    except SandboxPathError as error:
        raise _refusal(path, str(error)) from error


def _refusal(path: str, message: str) -> ToolError:
    """The driver has one type for every refused path; which one it is stands in its message only."""
    if "does not exist" in message and "is a link to" not in message:
        return NoSuchFile(f"no such file {path}")
    if "directory" in message or "regular file" in message:
        return WrongKind(message)
    return PathRefused(message)


@contextmanager
def _no_job(job: str) -> Iterator[None]:
    try:
        yield
    except SandboxNotFoundError as error:
        raise NoSuchJob(f"no job {job[:40]!r}; background jobs do not survive a restart of the workspace") from error
