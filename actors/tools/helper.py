"""Owner of the helper processes (`helper_worker.py`): one a Python process, and one for production
(`streams/priority.py`), each started when first needed.

Each request has a deadline twice over: the helper's own CPU alarm, and the wall clock here, many times longer, for a
host so loaded that CPU time hardly passes. Either way the helper is gone, the caller gets `HelperLost`, and the next
request starts a fresh one. Requests queue; searches are short.
"""

import asyncio
import marshal
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from odradek.streams.priority import Apart, ReservedThreads

WALL_FACTOR = 10.0
"""Wall seconds waited for each CPU second allowed. Too low: a busy host fails honest searches; too high: waits long."""

START_SECONDS = 15.0
"""Wall seconds added for the start of the process."""


class HelperLost(Exception):
    """The request used up its CPU seconds, or crashed the helper."""


class HelperRefused(Exception):
    """The request is no valid pattern."""


class Helper:
    """Thread-safe; blocking."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, kind: str, arguments: tuple[Any, ...], cpu_seconds: float) -> tuple[Any, float]:
        """The answer and the CPU seconds it took."""
        request = marshal.dumps((kind, arguments, max(cpu_seconds, 0.01)))
        with self._lock:
            try:
                process = self._started()
                deadline = time.monotonic() + START_SECONDS + WALL_FACTOR * cpu_seconds
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(len(request).to_bytes(4, "big") + request)
                process.stdin.flush()
                size = int.from_bytes(_read(process.stdout, 4, deadline), "big")
                ok, value, used = marshal.loads(_read(process.stdout, size, deadline))
            except (OSError, HelperLost) as error:
                self._end()
                raise HelperLost(f"{kind} used more than {cpu_seconds:g} s of CPU, or crashed") from error
            except BaseException:
                self._end()
                raise
        if not ok:
            raise HelperRefused(value)
        return value, used

    def close(self) -> None:
        """End the process; the next call starts another."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            worker = Path(__file__).with_name("helper_worker.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # what was not yet written to a helper that is gone
        return


def _read(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    pieces, descriptor, poller = [], pipe.fileno(), select.poll()  # select() itself ends at descriptor 1024
    poller.register(descriptor, select.POLLIN)
    while size > 0:
        ready = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        piece = os.read(descriptor, size) if ready else b""
        if not piece:
            raise HelperLost("no answer")
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


_HELPERS = Apart(Helper)
_QUEUE = ReservedThreads(1, "tools-helper")


async def call_helper(kind: str, arguments: tuple[Any, ...], cpu_seconds: float) -> tuple[Any, float]:
    """A helper, without blocking the loop; calls wait in its own thread's queue, not in the loop's pool."""
    return await asyncio.get_running_loop().run_in_executor(_QUEUE, _HELPERS.mine().call, kind, arguments, cpu_seconds)
