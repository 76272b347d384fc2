"""An event loop of the actor's own, on its own thread, started by the constructor.

Why not Ray's loop: a restarted actor must resume its work at once, and Ray runs an async actor's loop only for calls
that somebody makes. Work that belongs to the actor runs here; Ray's methods hand over and wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
import uvloop

from odradek.streams.errors import ProducerFenced, UnknownEventType
from odradek.streams.priority import ReservedThreads

T = TypeVar("T")
log = logging.getLogger(__name__)

STOP_DEADLINE_S = 10.0
"""Seconds a loop may take to end its tasks. Too low cuts off a commit; too high delays `odradek down`."""

BEGIN_PAUSE_S = 1.0
"""Seconds between two starts of an actor that cannot start. Too low: the host does nothing but start processes."""


class LoopThread:
    """Runs coroutines for an actor. A failed main task ends the process, so that Ray restarts the actor."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._loop.set_default_executor(ReservedThreads(thread_name_prefix=name))
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._mains: list[Future[Any]] = []
        self.stood_down = ""
        """Why, where the actor's own work ended for good: who took over, or what it can't read; for its `state()`."""

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self, work: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """The actor's start: run it and wait for it, in the constructor. In a first start an error is raised, and `up`
        says it. A restarted actor must not raise: Ray gives an actor whose constructor raised up for good, and a broker
        that is away just then would do. So it ends its process, and Ray starts another, until one comes up."""
        try:
            return self.submit(work).result(deadline_s)
        except BaseException:
            if not _restarted():
                raise
            log.exception("%s could not start again; ending the process for another try", self._thread.name)
            logging.shutdown()
            time.sleep(BEGIN_PAUSE_S)
            os._exit(70)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it on the caller's."""
        return await asyncio.wrap_future(self.submit(work))

    def main(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """The actor's own work. If it raises, the actor is of no use: log why and exit; Ray starts a fresh one,
        which folds the log. A failure that is swallowed would look like a hang.

        A fenced writer is different: another one does its work, and a fresh one of ours would only take it back, and
        so on in turns. It stands down: it stays up, idle, and says so. So does one that has met what a newer release
        wrote: its next start would meet it again."""

        async def guarded() -> None:
            try:
                await work
            except (asyncio.CancelledError, GeneratorExit):
                raise  # ended, or dropped together with its loop
            except BaseException as error:
                if (final := _final(error)) is not None:
                    self.stood_down = f"stands down: {final}"
                    log.error("%s %s", what, self.stood_down)
                    return
                log.exception("%s failed; ending the process so that it is restarted", what)
                logging.shutdown()
                os._exit(70)

        self._mains.append(self.submit(guarded()))

    def stop(self) -> None:
        """Cancel the actor's own work and end the loop."""
        for future in self._mains:
            future.cancel()
        done = self.submit(self._drain())
        done.result(STOP_DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_DEADLINE_S)

    async def _drain(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=STOP_DEADLINE_S / 2) if tasks else None


def _restarted() -> bool:
    """Whether Ray has started this actor before; a plain object outside of Ray it has not."""
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return False
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _final(error: BaseException) -> ProducerFenced | UnknownEventType | None:
    """What no restart mends in an error, alone or among those of a task group."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for one in error.exceptions if (found := _final(one)) is not None), None)
    return error if isinstance(error, ProducerFenced | UnknownEventType) else None
