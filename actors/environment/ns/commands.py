"""The commands of one sandbox: start, stream, finish, jobs, idempotency keys, epochs.

A command leaves `running` when init reports its end; while its background children live it is `held`, so that its pipes
go on being emptied. Each wait is bounded by the command's time-out plus `EXEC_GRACE_S`; past that the sandbox itself is
at fault and `on_hung` destroys it.
"""

import asyncio
import itertools
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress

from odradek.actors.environment.errors import (
    SandboxError,
    SandboxInfraError,
    SandboxNotFoundError,
    SandboxSpecError,
)
from odradek.actors.environment.ns import wire
from odradek.actors.environment.ns.execution import Execution
from odradek.actors.environment.ns.limits import MAX_LIFETIME_S
from odradek.actors.environment.protocol import WORKSPACE, ExecRequest, ExecResult, JobStatus, OutputChunk

EXEC_GRACE_S = 15.0
"""Seconds past a command's time-out before its sandbox counts as lost. Too low: a loaded host loses good sandboxes; too
high: a hung init is noticed late."""

KEPT_RESULTS = 1024
"""Results kept by idempotency key. Too low: a late retry runs its command again; too high: memory."""

STREAM_AHEAD = 64
"""Chunks buffered for a slow reader of a stream before the command is made to wait. Too low: switches for each chunk;
too high: memory."""

Send = Callable[[wire.Message, tuple[int, ...]], None]
OnText = Callable[[OutputChunk], None]


class Commands:
    """Commands of one sandbox; `send` reaches its init."""

    def __init__(self, name: str, env: Mapping[str, str], send: Send, on_hung: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._env = env
        self._send = send
        self._on_hung = on_hung
        self._numbers = itertools.count(1)
        self.running: dict[int, Execution] = {}
        self._held: dict[int, Execution] = {}
        self._jobs: dict[str, Execution] = {}
        self._by_key: OrderedDict[str, asyncio.Task[ExecResult]] = OrderedDict()
        self._epoch = 0

    # --- from init ---

    def exited(self, message: wire.Message) -> None:
        execution = self.running.pop(message["id"], None)
        if execution is None:
            return
        if "error" in message:
            execution.failed(SandboxInfraError(f"{self._name}: {message['error']}"))
            return
        self._held[message["id"]] = execution
        execution.exited(message["status"], message["timed_out"])

    def over(self, message: wire.Message) -> None:
        """The last descendant of a command is gone."""
        execution = self._held.pop(message["id"], None)
        if execution is not None:
            execution.close()

    def lost(self, error: SandboxError) -> None:
        for execution in (*self.running.values(), *self._held.values()):
            execution.failed(error)
        self.running.clear()
        self._held.clear()

    # --- from the caller ---

    def start(self, request: ExecRequest, on_text: OnText | None = None) -> Execution:
        argv = check_request(request)
        if request.epoch < self._epoch:
            raise SandboxSpecError(f"{self._name}: call of epoch {request.epoch}, but epoch {self._epoch} took over")
        exec_id = next(self._numbers)
        execution = Execution(exec_id, request, on_text, lambda: self.kill(exec_id))
        message = {
            "op": "exec",
            "id": exec_id,
            "argv": argv,
            "cwd": os.path.join(WORKSPACE, request.cwd),  # noqa: PTH118 - a path of the sandbox
            "env": {**self._env, **request.env},
            "timeout": request.timeout_s,
        }
        writers = execution.open_pipes()
        try:
            self._send(message, writers)
        except BaseException:
            execution.close()
            raise
        finally:
            for fd in writers:
                os.close(fd)
        self.running[exec_id] = execution
        return execution

    async def finish(self, execution: Execution) -> ExecResult:
        patience = execution.request.timeout_s + EXEC_GRACE_S
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(execution.result)
        except TimeoutError:
            await self._on_hung()
            raise SandboxInfraError(
                f"{self._name}: no end of a command {patience:g} s after its start; the sandbox was destroyed"
            ) from None
        except asyncio.CancelledError:
            self.kill(execution.exec_id)
            raise

    async def once(self, key: str, run: Callable[[], Awaitable[ExecResult]]) -> ExecResult:
        """Run under an idempotency key: a call that is under way or has ended is joined, not repeated."""
        task = self._by_key.get(key)
        if task is None:
            task = self._by_key[key] = asyncio.ensure_future(run())
            while len(self._by_key) > KEPT_RESULTS:
                self._by_key.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._by_key.pop(key, None)
            task.cancel()
            raise
        except SandboxError:
            self._by_key.pop(key, None)  # nothing happened that a retry would repeat, or the sandbox is gone
            raise

    async def stream(self, start: Callable[[OnText], Awaitable[Execution]]) -> AsyncIterator[OutputChunk | ExecResult]:
        chunks: asyncio.Queue[OutputChunk | None] = asyncio.Queue()
        execution: Execution | None = None

        def on_text(chunk: OutputChunk) -> None:
            chunks.put_nowait(chunk)
            if execution is not None and chunks.qsize() >= STREAM_AHEAD:
                execution.pause(True)

        execution = await start(on_text)
        execution.result.add_done_callback(lambda _: chunks.put_nowait(None))
        finish = asyncio.ensure_future(self.finish(execution))
        try:
            while (chunk := await chunks.get()) is not None:
                if chunks.qsize() < STREAM_AHEAD // 2:
                    execution.pause(False)
                yield chunk
            yield await finish
        finally:
            finish.cancel()

    def kill(self, exec_id: int) -> None:
        with suppress(SandboxInfraError):
            self._send({"op": "kill", "id": exec_id}, ())

    def add_job(self, execution: Execution) -> str:
        job_id = f"job-{execution.exec_id}"
        self._jobs[job_id] = execution
        return job_id

    def poll(self, job_id: str) -> JobStatus:
        execution = self._job(job_id)
        output, truncated = execution.take_output()
        if not execution.result.done():
            return JobStatus(job_id, True, output, truncated=truncated)
        result = execution.result.result()
        return JobStatus(job_id, False, output, result.exit_code, result.signal, truncated)

    async def stop(self, job_id: str) -> JobStatus:
        execution = self._job(job_id)
        self.kill(execution.exec_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(EXEC_GRACE_S):
                await asyncio.shield(execution.result)
        return self.poll(job_id)

    async def take_over(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise SandboxSpecError(f"{self._name}: epoch {epoch} can't take over from epoch {self._epoch}")
        self._epoch = epoch
        older = [execution for execution in self.running.values() if execution.request.epoch < epoch]
        for execution in older:
            self.kill(execution.exec_id)
        async with asyncio.timeout(EXEC_GRACE_S):
            await asyncio.gather(*(asyncio.shield(execution.result) for execution in older), return_exceptions=True)

    def _job(self, job_id: str) -> Execution:
        try:
            return self._jobs[job_id]
        except KeyError:
            raise SandboxNotFoundError(f"{self._name} has no job {job_id!r}; it has {sorted(self._jobs)}") from None


def check_request(request: ExecRequest) -> list[str]:
    """The argument vector of a well-formed request."""
    if bool(request.argv) == bool(request.shell):
        raise SandboxSpecError("a command is either `argv` or a `shell` line: exactly one of them")
    if not 0 < request.timeout_s <= MAX_LIFETIME_S or request.max_output_bytes < 2:
        raise SandboxSpecError("a command needs a positive time-out and room for output")
    argv = list(request.argv) or ["/bin/sh", "-c", request.shell]
    if any("\0" in part for part in (*argv, request.cwd, *request.env, *request.env.values())):
        raise SandboxSpecError("a command can't contain a zero byte")
    if request.cwd.startswith("/") and not (request.cwd + "/").startswith(WORKSPACE + "/"):
        raise SandboxSpecError(f"working directory {request.cwd!r} is not in the workspace")
    return argv
