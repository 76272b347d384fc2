"""The driver's end of a socket to the zygote or to an init, on the event loop.

Requests carry a number (`rid`) and wait for the reply with the same one until their deadline; everything else that
arrives is an event and goes to `on_event` in order. When the other side ends, every waiting request fails and `on_end`
is called once. Nothing is ever sent after `close`.
"""

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from odradek.actors.environment.errors import SandboxGoneError, SandboxInfraError, SandboxSpecError
from odradek.actors.environment.ns import wire


class Channel:
    """One socket. `on_event` gets events with their descriptors, which it then owns."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_event: Callable[[wire.Message, list[int]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._name = name
        self._on_event = on_event
        self._on_end = on_end
        self._waiting: dict[int, asyncio.Future[wire.Message]] = {}
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._next = 0
        self._loop = asyncio.get_running_loop()
        self.ended = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    async def request(self, message: wire.Message, deadline_s: float, fds: tuple[int, ...] = ()) -> wire.Message:
        """Send and wait for the reply; an `error` in it is raised."""
        self._next += 1
        rid = self._next
        future = self._waiting[rid] = self._loop.create_future()
        try:
            self.send({"rid": rid, **message}, fds)
            async with asyncio.timeout(deadline_s):
                reply: wire.Message = await future
        except TimeoutError:
            raise SandboxInfraError(f"{self._name}: no answer to {message['op']!r} within {deadline_s:g} s") from None
        finally:
            self._waiting.pop(rid, None)
        if "error" in reply:
            raise SandboxInfraError(f"{self._name}: {message['op']!r} failed: {reply['error']}")
        return reply

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Send without waiting; in order, also when the other side is behind. Descriptors may be closed afterwards."""
        if self.ended:
            raise SandboxGoneError(f"{self._name} has ended")
        data = wire.encode(message)
        if len(data) > wire.MAX_MESSAGE_BYTES:
            raise SandboxSpecError(
                f"{message.get('op')!r} of {len(data)} bytes: at most {wire.MAX_MESSAGE_BYTES}; put it into a file"
            )
        if not self._unsent and self._try_send(data, fds):
            return
        self._unsent.append((data, tuple(os.dup(fd) for fd in fds)))
        self._loop.add_writer(self._sock.fileno(), self._writable)

    def close(self) -> None:
        """End the connection from our side; waiting requests fail, `on_end` is not called."""
        if not self.ended:
            self._end()

    def _try_send(self, data: bytes, fds: tuple[int, ...]) -> bool:
        try:
            socket.send_fds(self._sock, [data], fds)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxGoneError(f"{self._name} has ended: {error.strerror}") from error
        return True

    def _writable(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            with contextlib.suppress(SandboxGoneError):  # the reader sees the end as well and tells everybody
                if not self._try_send(data, fds):
                    return
            self._unsent.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        while not self.ended:
            try:
                received = wire.receive(self._sock)
            except BlockingIOError:
                return
            except OSError:
                received = None
            if received is None:
                self._end()
                self._on_end()
                return
            message, fds = received
            future: asyncio.Future[Any] | None = self._waiting.get(message.get("rid", 0))
            if future is None:
                if "rid" not in message:
                    self._on_event(message, fds)
            elif not future.done():
                future.set_result(message)
            if "rid" in message:
                for fd in fds:  # no reply carries any
                    os.close(fd)

    def _end(self) -> None:
        self.ended = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        while self._unsent:
            for fd in self._unsent.popleft()[1]:
                os.close(fd)
        with contextlib.suppress(OSError):
            self._sock.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxGoneError(f"{self._name} has ended"))
