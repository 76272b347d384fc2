"""The zygote as its driver sees it: started once, stopped once, watched in between."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import odradek
from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.environment.ns import wire
from odradek.actors.environment.ns.channel import Channel
from odradek.actors.environment.ns.instance import Instance

START_DEADLINE_S = 20.0
"""Seconds until the zygote must be up. Too low: a loaded host can't start; too high: a broken one is noticed late."""

STOP_DEADLINE_S = 20.0
"""Seconds the zygote may take to end all sandboxes before it is killed. Too low: files are left to the next start."""

BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from odradek.actors.environment.ns.zygote import main; main()"

OnGone = Callable[[str, int, bool], None]


class ZygoteHost:
    """A running zygote. `on_gone(sandbox, wait status, expired)` tells of each sandbox that ended."""

    def __init__(self, process: "subprocess.Popen[bytes]", on_gone: OnGone, on_end: Callable[[], None]) -> None:
        self._process = process
        self._on_gone = on_gone
        self._on_end = on_end
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel: Channel | None = None
        self._stopping = False

    @classmethod
    async def start(
        cls,
        instance: Instance,
        images_dir: str,
        uid: int,
        cgroups: Sequence[str],
        on_gone: OnGone,
        on_end: Callable[[], None],
    ) -> "ZygoteHost":
        ours, theirs = wire.pair()
        log_fd = os.open("zygote.log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=instance.fd)
        try:
            fds = (theirs.fileno(), instance.state_fd, instance.lock_fd)
            command = (sys.executable, "-I", "-S", "-B", "-c", BOOT, _import_root())
            process = subprocess.Popen(  # noqa: ASYNC220 - once, and it does not wait
                [*command, *map(str, fds), str(uid), instance.name, images_dir, ":".join(cgroups)],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log_fd,
                pass_fds=fds,
                start_new_session=True,  # an interrupt from the terminal is the driver's to handle
            )
            host = cls(process, on_gone, on_end)
            await host._listen(ours, log_fd)
        finally:
            theirs.close()
            os.close(log_fd)
        return host

    async def _listen(self, sock: socket.socket, log_fd: int) -> None:
        self._channel = Channel(sock, "zygote", self._on_event, self._ended)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._up
        except (TimeoutError, SandboxInfraError) as error:
            self._process.kill()
            self._process.wait()
            log = os.pread(log_fd, 4000, 0).decode(errors="replace").strip()
            raise SandboxInfraError(f"the zygote did not start: {log or error}") from error

    @property
    def ended(self) -> bool:
        return self._channel is None or self._channel.ended

    @property
    def pid(self) -> int:
        return self._process.pid

    async def request(self, message: wire.Message, deadline_s: float, fds: tuple[int, ...] = ()) -> wire.Message:
        if self._channel is None:
            raise SandboxInfraError("the zygote is not running")
        return await self._channel.request(message, deadline_s, fds)

    async def stop(self) -> None:
        """Close the socket: the zygote ends what is left and goes."""
        self._stopping = True
        if self._channel is not None:
            self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait, STOP_DEADLINE_S)

    def _on_event(self, message: wire.Message, fds: list[int]) -> None:
        if message["ev"] == "up" and not self._up.done():
            self._up.set_result(None)
        elif message["ev"] == "gone":
            self._on_gone(message["sandbox"], message["status"], message["expired"])

    def _ended(self) -> None:
        if not self._up.done():
            self._up.set_exception(SandboxInfraError("the zygote ended at once"))
        elif not self._stopping:
            self._on_end()


def _import_root() -> str:
    """The directory from which `odradek` is imported, for an interpreter that knows no site-packages."""
    return str(Path(next(iter(odradek.__path__))).parent)
