"""Commands of a `LocalWorkspace`: each in its own process group, from an empty environment, with its output piped here.

A command is over when its process has exited and what it wrote until then is read. End-of-file on the pipe is not
waited for: a background child may hold it for hours.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import signal
from collections.abc import Callable

from odradek.actors.tools.workspace import Exit, JobStatus, OnOutput

ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""All a command gets, plus HOME; nothing of this process's environment is passed on."""

READ_BYTES = 64 * 1024
"""One read, the size of a pipe's buffer. Lower: more wake-ups; higher has no effect."""

JOB_OUTPUT_CHARS = 256 * 1024
"""Output kept between two polls of a job. Too low: a chatty server's errors are lost; too high: memory for each job."""

KILL_SECONDS = 5.0
"""Wait for a killed process to be reaped; longer means it hangs in the kernel, which is a fault of the host."""


class _Output:
    """Reads a pipe as it fills and hands on text that never ends inside a character."""

    def __init__(self, on_output: OnOutput) -> None:
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._reader, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._readable)

    def started(self) -> None:
        """The child has its copy of the writing end."""
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        """Read what is there now, then stop."""
        if self._reader >= 0:
            while self._readable():
                pass
            self._pass_on(b"", final=True)
            self._stop()
        if self.writer >= 0:
            self.started()

    def _readable(self) -> bool:
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._reader)
            return False
        self._pass_on(data, final=False)
        return True

    def _pass_on(self, data: bytes, final: bool) -> None:
        text = self._decoder.decode(data, final)
        if text:
            self._on_output(text)

    def _stop(self) -> None:
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        self._reader = -1


class LocalProcesses:
    """Starts commands in `root` and remembers the groups that outlive theirs."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._left_behind: list[int] = []

    async def run(self, command: str, timeout_s: float, on_output: OnOutput) -> Exit:
        """To the end, or until the time-out ends its whole group."""
        output = _Output(on_output)
        try:
            process = await self._spawn(command, output)
            try:
                code = await asyncio.wait_for(process.wait(), timeout_s)
            except TimeoutError:
                await end_group(process)
                return Exit(None, timed_out=True)
            except BaseException:
                await end_group(process)
                raise
            if _group_alive(process.pid):
                self._left_behind.append(process.pid)
            return Exit(code if code >= 0 else 128 - code)
        finally:
            output.close()

    async def start(self, command: str) -> BackgroundJob:
        """In the background."""
        job = BackgroundJob()
        output = _Output(job.feed)
        try:
            job.attach(await self._spawn(command, output), output.close)
        except BaseException:
            output.close()
            raise
        return job

    def end_left_behind(self) -> None:
        """End background children of commands that are over. Their group id is theirs as long as one of them lives."""
        for group in self._left_behind:
            if _group_alive(group):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        self._left_behind.clear()

    async def _spawn(self, command: str, output: _Output) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            command,
            cwd=self._root,
            env={**ENVIRONMENT, "HOME": self._root},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.writer,
            stderr=output.writer,
            start_new_session=True,
        )
        output.started()
        return process


class BackgroundJob:
    """One background command: what it wrote since the last poll, and how it stands."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._close: Callable[[], None] = lambda: None
        self._text = ""
        self._truncated = False
        self._stopped = False

    def attach(self, process: asyncio.subprocess.Process, close: Callable[[], None]) -> None:
        self._process, self._close = process, close

    def feed(self, text: str) -> None:
        self._text += text
        if len(self._text) > JOB_OUTPUT_CHARS:
            self._text, self._truncated = self._text[-JOB_OUTPUT_CHARS:], True

    async def poll(self) -> JobStatus:
        assert self._process is not None
        code = self._process.returncode
        if code is not None:
            self._close()
        text, truncated = self._text, self._truncated
        self._text, self._truncated = "", False
        code = None if code is None or self._stopped else code if code >= 0 else 128 - code
        return JobStatus(text, self._process.returncode is None, code, truncated)

    async def stop(self) -> JobStatus:
        assert self._process is not None
        if self._process.returncode is None:
            self._stopped = True
            await end_group(self._process)
        return await self.poll()


async def end_group(process: asyncio.subprocess.Process) -> None:
    """Kill the command's group and reap the command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait_for(process.wait(), KILL_SECONDS)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
