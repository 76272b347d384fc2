"""A TCP proxy in front of the object store that fails on demand: the deployment knows only its address.

Modes: `pass`; `refuse` (connections are closed at once); `error` (503 SlowDown, the store is not asked); `stall` (a
connection is taken and nothing comes back while the mode lasts); `slow` (a pause before each 64 KiB: a slow disk);
`late` (the store does what was asked and the answer is lost); `cut` (the answer ends in the middle). A change of mode
cuts the connections of the old one, except that `slow` and `pass` keep theirs. Runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal, get_args

from support.waiting import lasting

Mode = Literal["pass", "refuse", "error", "stall", "slow", "late", "cut"]
MODES: tuple[Mode, ...] = get_args(Mode)
CHUNK = 64 * 1024
SLOW_S = 0.15
"""Seconds before each chunk of a slow store: a checkpoint of 10 MB then takes half a minute."""
ERROR = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>injected</Message></Error>'
ANSWER = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"


class FaultyProxy:
    """Use as a context manager; `port` is where it listens, on loopback."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = upstream_port
        self._mode: Mode = "pass"
        self._open: set[asyncio.StreamWriter] = set()
        self._never = asyncio.Event()
        """Keeps who waits for it alive: a task that nothing refers to is collected, and its connection closed."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self.port = 0

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self.port = server.result(10).sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def become(self, mode: Mode) -> None:
        """From now on."""
        self._loop.call_soon_threadsafe(self._become, mode)

    def _become(self, mode: Mode) -> None:
        harmless = {self._mode, mode} <= {"pass", "slow"}
        self._mode = mode
        for writer in [] if harmless else list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match self._mode:
            case "refuse":
                return
            case "error":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(ANSWER % (len(ERROR), ERROR))
                await writer.drain()
                writer.write_eof()
                await reader.read()  # to the end, so that the answer is not lost in a reset
            case "stall":
                await self._never.wait()  # ended by the next mode, which cuts the connection
            case mode:
                up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
                try:
                    await self._both(reader, writer, up_reader, up_writer, mode)
                finally:
                    up_writer.transport.abort()

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
        mode: Mode,
    ) -> None:
        """Until either side closes. The mode of the connection's beginning decides what becomes of answers."""
        directions = {
            asyncio.create_task(self._pump(reader, up_writer, "pass")),
            asyncio.create_task(self._pump(up_reader, writer, mode)),
        }
        _, rest = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*directions, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, mode: Mode) -> None:
        while data := await source.read(CHUNK):
            if mode == "late":
                return
            if mode == "cut":
                sink.write(data[: len(data) // 2])
                await sink.drain()
                return
            if self._mode == "slow":
                await lasting(SLOW_S)
            sink.write(data)
            await sink.drain()
