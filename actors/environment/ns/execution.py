"""One command as the driver sees it: its pipes, its end, its result.

Rule of the end: a command is over when init reports its process's status and what lay in the pipes at that moment has
been read. EOF is not waited for: a background child may hold the pipe for hours. Until EOF the pipe is still emptied,
and what comes is thrown away, so that such a child neither blocks nor dies of a broken pipe.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from typing import Literal

from odradek.actors.environment.errors import SandboxError
from odradek.actors.environment.ns.output import MAX_DRAINED_BYTES, BoundedOutput, TextDecoder
from odradek.actors.environment.protocol import ExecRequest, ExecResult, OutputChunk

READ_BYTES = 64 * 1024
"""Bytes a read takes at once: the size of a pipe. Smaller: more wake-ups; larger: no effect."""

Stream = Literal["stdout", "stderr"]


class Pipe:
    """The reading end of one stream."""

    def __init__(self, fd: int, stream: Stream, limit: int) -> None:
        self.fd = fd
        self.stream: Stream = stream
        self.output = BoundedOutput(limit)
        self.decoder = TextDecoder()


class Execution:
    """From request to result. `on_text` sees text as it comes; `kill` is called when output passes all bounds."""

    def __init__(
        self,
        exec_id: int,
        request: ExecRequest,
        on_text: Callable[[OutputChunk], None] | None,
        kill: Callable[[], None],
    ) -> None:
        self.exec_id = exec_id
        self.request = request
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[ExecResult] = self._loop.create_future()
        self.result.add_done_callback(_seen)
        self._on_text = on_text
        self._kill = kill
        self._started = time.monotonic()
        self._pipes: list[Pipe] = []
        self._paused = False

    def open_pipes(self) -> tuple[int, ...]:
        """Make the pipes and begin to read; returns the writing ends, which the caller closes after sending them."""
        streams: tuple[Stream, ...] = ("stdout",) if self.request.merge_output else ("stdout", "stderr")
        writers = []
        for stream in streams:
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            pipe = Pipe(reader, stream, self.request.max_output_bytes)
            self._pipes.append(pipe)
            self._loop.add_reader(reader, self._readable, pipe)
            writers.append(writer)
        return tuple(writers)

    def pause(self, paused: bool) -> None:
        """Stop or go on reading, so that a slow consumer slows the command instead of filling memory."""
        if paused != self._paused and not self.result.done():
            self._paused = paused
            for pipe in self._pipes:
                if pipe.fd >= 0 and paused:
                    self._loop.remove_reader(pipe.fd)
                elif pipe.fd >= 0:
                    self._loop.add_reader(pipe.fd, self._readable, pipe)

    def exited(self, status: int, timed_out: bool) -> None:
        """Init reported the end: take what is in the pipes now, then settle the result."""
        if self.result.done():
            return
        self.pause(False)
        for pipe in self._pipes:
            self._drain(pipe)
            self._emit(pipe, b"", last=True)
        code = os.waitstatus_to_exitcode(status)
        outputs = {pipe.stream: pipe.output for pipe in self._pipes}
        result = ExecResult(
            exit_code=code if code >= 0 else 128 - code,
            signal=max(0, -code),
            stdout=outputs["stdout"].text(),
            stderr=outputs["stderr"].text() if "stderr" in outputs else "",
            timed_out=timed_out,
            truncated=any(output.truncated for output in outputs.values()),
            duration_s=time.monotonic() - self._started,
        )
        self.result.set_result(result)

    def failed(self, error: SandboxError) -> None:
        """The sandbox ended first."""
        if not self.result.done():
            self.result.set_exception(error)
        self.close()

    def take_output(self) -> tuple[str, bool]:
        """Text since the last call, streams one after the other, and whether some was left out (for jobs)."""
        texts, truncated = [], False
        for pipe in self._pipes:
            texts.append(pipe.output.text())
            truncated |= pipe.output.truncated
            pipe.output = BoundedOutput(self.request.max_output_bytes)
        return "".join(texts), truncated

    def close(self) -> None:
        """Close the pipes, whoever still writes to them."""
        for pipe in self._pipes:
            self._close(pipe)

    def _readable(self, pipe: Pipe) -> None:
        try:
            data = os.read(pipe.fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(pipe)
        elif not self.result.done():
            self._emit(pipe, data)
            if pipe.output.total > MAX_DRAINED_BYTES:
                self._kill()

    def _drain(self, pipe: Pipe) -> None:
        if pipe.fd < 0:
            return
        waiting = struct.unpack("i", fcntl.ioctl(pipe.fd, termios.FIONREAD, b"\0" * 4))[0]
        while waiting > 0:
            with contextlib.suppress(BlockingIOError):
                data = os.read(pipe.fd, min(waiting, READ_BYTES))
                if data:
                    waiting -= len(data)
                    self._emit(pipe, data)
                    continue
            return

    def _emit(self, pipe: Pipe, data: bytes, *, last: bool = False) -> None:
        pipe.output.feed(data)
        if self._on_text is not None:
            text = pipe.decoder.feed(data, last=last)
            if text:
                self._on_text(OutputChunk(pipe.stream, text))

    def _close(self, pipe: Pipe) -> None:
        if pipe.fd >= 0:
            self._loop.remove_reader(pipe.fd)
            os.close(pipe.fd)
            pipe.fd = -1


def _seen(future: "asyncio.Future[ExecResult]") -> None:
    """A failure that nobody awaits any more (a background job of a lost sandbox) is not worth a warning."""
    if not future.cancelled():
        future.exception()
