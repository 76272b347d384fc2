"""One sandbox of the driver `ns`: the client's side of its init, its files and its life.

Consumes: the protocol's calls. Waits for: init's messages, each with a deadline. Unblocked by: init's answer, or its
end, which settles everything that waits with `SandboxGoneError`.

A snapshot freezes the upper directory. With no process running, the sandbox itself goes on over the frozen upper under
a new init (*restack*), and nothing is copied; while commands run, they are stopped for a moment and the upper is
copied. Other calls wait at the gate (`_use`) meanwhile.
"""

import asyncio
import itertools
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from odradek.actors.environment.delta import Delta, check, in_order
from odradek.actors.environment.errors import SandboxError, SandboxGoneError, SandboxInfraError, SandboxSpecError
from odradek.actors.environment.ns import wire
from odradek.actors.environment.ns.channel import Channel
from odradek.actors.environment.ns.commands import Commands, OnText
from odradek.actors.environment.ns.execution import Execution
from odradek.actors.environment.ns.files import WorkspaceFiles
from odradek.actors.environment.ns.instance import Record
from odradek.actors.environment.ns.limits import MAX_LIFETIME_S
from odradek.actors.environment.protocol import (
    DEFAULT_DEADLINE_S,
    ExecRequest,
    ExecResult,
    FetchContent,
    FileStat,
    JobStatus,
    Network,
    OutputChunk,
    SandboxMetrics,
    SandboxSpec,
)

if TYPE_CHECKING:
    from odradek.actors.environment.ns.driver import NsDriver
    from odradek.actors.environment.ns.stack import Stack

T = TypeVar("T")

FILES_DEADLINE_S = 120.0
"""Seconds a call on files may take. Too low: a large workspace can't be read; too high: a dead disk hangs calls."""


class NsSandbox:
    """See `protocol.Sandbox`. Made by the driver only."""

    def __init__(self, driver: "NsDriver", sandbox_id: str, spec: SandboxSpec, stack: "Stack", record: Record) -> None:
        self._driver = driver
        self._id = sandbox_id
        self._spec = spec
        self.stack = stack
        self.record = record
        self.made = False
        """Whether the driver is done with making it."""
        self.pid = 0
        self.init_name = ""
        """The zygote's name for the present init; a restacked sandbox has had several."""
        self.gone = asyncio.Event()
        self._inits = itertools.count(1)
        self.created_at = time.monotonic()
        self.ends_at = self.created_at + spec.lifetime_s
        env = {**driver.images.image(spec.image).env, **spec.env}
        self._commands = Commands(f"sandbox {sandbox_id}", env, self._send, self.destroy)
        self._channel: Channel | None = None
        self._files: WorkspaceFiles | None = None
        self._ready: asyncio.Future[None] | None = None
        self._why_gone = ""
        self._paused = False
        self._gate = asyncio.Event()
        self._gate.set()
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.snapshotting = asyncio.Lock()

    @property
    def sandbox_id(self) -> str:
        return self._id

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    # --- life, called by the driver ---

    def attach(self, sock: socket.socket) -> "asyncio.Future[None]":
        """Listen to a new init; the future settles when it is ready, or says why it could not be."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # read, if nobody waits
        self._channel = Channel(sock, f"sandbox {self._id}", self._on_event, self._on_end)
        self.init_name = f"{self._id}.{next(self._inits)}"
        self.gone = asyncio.Event()
        return self._ready

    def warm(self) -> None:
        """Have init fork what the first command needs, while the caller does something else."""
        self._send({"op": "warm"}, ())

    def detach(self) -> None:
        """Let go of the init; it ends by that."""
        if self._channel is not None:
            self._channel.close()
        if self._files is not None:
            self._files.close()
            self._files = None

    def ended(self, why: str) -> None:
        """The present init's process is gone."""
        self.gone.set()
        self.fail(why)

    def fail(self, why: str) -> None:
        """The sandbox is lost: everything that waits fails with the reason, now and later."""
        self._why_gone = self._why_gone or why
        error = SandboxGoneError(f"sandbox {self._id}: {self._why_gone}")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
        self._commands.lost(error)
        self.detach()

    def _on_event(self, message: wire.Message, fds: list[int]) -> None:
        match message["ev"]:
            case "ready":
                self._files = WorkspaceFiles(fds[0])
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(None)
            case "exit":
                self._commands.exited(message)
            case "over":
                self._commands.over(message)
            case _:  # failed, broken: init says why before it ends
                self._why_gone = f"init {message['ev']}: {message['error']}"
                if self._ready is not None and not self._ready.done():
                    self._ready.set_exception(SandboxInfraError(f"sandbox {self._id}: {self._why_gone}"))

    def _on_end(self) -> None:
        """The socket closed; the zygote's `gone` follows and tells why."""

    # --- commands ---

    async def exec(self, request: ExecRequest) -> ExecResult:
        if request.key:
            return await self._commands.once(request.key, lambda: self._run(request))
        return await self._run(request)

    async def _run(self, request: ExecRequest) -> ExecResult:
        return await self._commands.finish(await self._start(request))

    def exec_stream(self, request: ExecRequest) -> AsyncIterator[OutputChunk | ExecResult]:
        return self._commands.stream(lambda on_text: self._start(request, on_text))

    async def _start(self, request: ExecRequest, on_text: OnText | None = None) -> Execution:
        async with self._use():
            if self._paused:
                raise SandboxSpecError(f"sandbox {self._id} is paused; resume it first")
            self._driver.count_exec()
            return self._commands.start(request, on_text)

    async def start_job(self, request: ExecRequest) -> str:
        return self._commands.add_job(await self._start(request))

    async def poll_job(self, job_id: str) -> JobStatus:
        return self._commands.poll(job_id)

    async def stop_job(self, job_id: str) -> JobStatus:
        return await self._commands.stop(job_id)

    async def take_over(self, epoch: int) -> None:
        await self._commands.take_over(epoch)

    # --- files ---

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes:
        return await self._on_files(lambda files: files.read(path, offset, limit))

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> FileStat:
        return await self._on_files(lambda files: files.write(path, data, mode))

    async def stat(self, path: str, *, follow: bool = True) -> FileStat:
        return await self._on_files(lambda files: files.stat(path, follow))

    async def list(self, path: str = "", *, recursive: bool = False) -> tuple[FileStat, ...]:
        return await self._on_files(lambda files: files.entries(path, recursive))

    async def upload(self, files: Mapping[str, bytes]) -> None:
        def put(target: WorkspaceFiles) -> None:
            for path, data in files.items():
                target.write(path, data, None)

        await self._on_files(put)

    async def download(self, path: str = "") -> Mapping[str, bytes]:
        return await self._on_files(lambda files: files.download(path))

    async def diff(self, *, incremental: bool = False) -> Delta:
        return await self._on_files(lambda _: self.stack.diff(incremental))

    async def apply(self, delta: Delta, fetch: FetchContent | None = None) -> None:
        check(delta)
        contents: dict[str, bytes] = {}
        for entry in delta.entries:
            if entry.kind == "file" and entry.content is None:
                if fetch is None:
                    raise SandboxSpecError(f"delta entry {entry.path!r} has no content, and no `fetch` was given")
                contents[entry.digest] = await fetch(entry.digest)

        def carry_out(files: WorkspaceFiles) -> None:
            files.apply(in_order(delta), contents)
            self.stack.settle()

        await self._on_files(carry_out)

    async def _on_files(self, work: Callable[[WorkspaceFiles], T]) -> T:
        async with self._use():
            files = self._files
            if files is None:
                raise SandboxGoneError(f"sandbox {self._id}: {self._why_gone or 'it has no init'}")

            def run() -> T:
                with files.held():
                    return work(files)

            try:
                async with asyncio.timeout(FILES_DEADLINE_S):
                    return await self._driver.in_file_thread(run)
            except TimeoutError:
                raise SandboxInfraError(f"sandbox {self._id}: file call not done in {FILES_DEADLINE_S:g} s") from None
            except (OSError, SandboxInfraError) as error:
                self._alive()  # destroyed under the call: say that
                if isinstance(error, OSError):
                    raise SandboxInfraError(f"sandbox {self._id}: {error}") from error
                raise

    # --- copies and state ---

    async def snapshot(self) -> str:
        async def nothing(snapshot_id: str) -> str:
            return snapshot_id

        return await self._freeze(nothing)

    async def fork(self, *, key: str = "") -> "NsSandbox":
        async def create(snapshot_id: str) -> "NsSandbox":
            try:
                return await self._driver.create_from(snapshot_id, key=key)
            finally:
                await self._driver.drop_snapshot(snapshot_id)

        return await self._freeze(create)

    async def _freeze(self, use: Callable[[str], Awaitable[T]]) -> T:
        """Take a snapshot and use it, with all other calls held off until this sandbox can go on."""
        async with self.snapshotting:
            self._gate.clear()
            try:
                await self._idle.wait()
                self._alive()
                if self._commands.running or await self._processes():
                    return await use(await self._snapshot_running())
                return await self._restack(use)
            except OSError as error:
                raise SandboxInfraError(f"sandbox {self._id}: its files could not be frozen: {error}") from error
            finally:
                self._gate.set()

    async def _snapshot_running(self) -> str:
        if not self._paused:
            await self._signal_all(signal.SIGSTOP)
        try:
            frozen = await self._driver.in_file_thread(self.stack.copy_upper)
        finally:
            if not self._paused:
                await self._signal_all(signal.SIGCONT)
        return self._driver.keep_snapshot(self._spec, frozen)

    async def _restack(self, use: Callable[[str], Awaitable[T]]) -> T:
        """Freeze the upper itself, then start another init above it while the snapshot is being used.

        The former init is let go and not waited for: it runs no command, so nothing writes through its mount any more.
        """
        try:
            self._driver.release_init(self)
            frozen = await self._driver.in_file_thread(self.stack.freeze_upper)
            left = self.ends_at - time.monotonic()
            restart = asyncio.ensure_future(self._driver.start_init(self, left, DEFAULT_DEADLINE_S))
        except BaseException:
            self.fail("lost while its files were being frozen")
            raise
        try:
            return await use(self._driver.keep_snapshot(self._spec, frozen))
        finally:
            try:
                await restart
            except (SandboxError, OSError) as error:  # the snapshot is good all the same
                self.fail(f"lost while its files were being frozen: {error}")

    async def pause(self) -> None:
        async with self._use():
            self._paused = True
            await self._signal_all(signal.SIGSTOP)

    async def resume(self) -> None:
        async with self._use():
            await self._signal_all(signal.SIGCONT)
            self._paused = False

    async def set_network(self, network: Network) -> None:
        if network != self._spec.network:
            raise SandboxSpecError(
                f"sandbox {self._id} was made with network {self._spec.network!r}; driver ns can't change it to "
                f"{network!r}: create another sandbox"
            )

    async def renew(self, lifetime_s: float) -> None:
        if not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise SandboxSpecError(f"lifetime of {lifetime_s} s: expected more than 0 and at most {MAX_LIFETIME_S:g}")
        async with self._use():
            await self._driver.renew(self, lifetime_s)

    async def destroy(self) -> None:
        await self._driver.destroy(self)

    async def metrics(self) -> SandboxMetrics:
        async with self._use():
            return await self._driver.measure(self, await self._processes())

    async def _processes(self) -> int:
        reply = await self._live_channel().request({"op": "count"}, DEFAULT_DEADLINE_S)
        return int(reply["count"])

    async def _signal_all(self, number: int) -> None:
        await self._live_channel().request({"op": "signal", "signal": int(number)}, DEFAULT_DEADLINE_S)

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[None]:
        """Hold off a snapshot for the duration of a call."""
        await self._gate.wait()
        self._alive()
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self._idle.set()

    def _alive(self) -> None:
        if self._why_gone:
            raise SandboxGoneError(f"sandbox {self._id}: {self._why_gone}")

    def _live_channel(self) -> Channel:
        if self._channel is None or self._channel.ended:
            raise SandboxGoneError(f"sandbox {self._id}: {self._why_gone or 'its init has ended'}")
        return self._channel

    def _send(self, message: wire.Message, fds: tuple[int, ...]) -> None:
        self._live_channel().send(message, fds)
