"""The thread that owns an engine: commands in, results out, one step after another.

Consumes: commands posted from any thread. Produces: futures. Waits for: a command, when the engine is idle; unblocked
by `_post` and `stop`; each idle wait ends by itself after `IDLE_WAIT`. This thread alone touches the engine.

Promises:
- Each submitted request's future ends: with its result, its error, `EngineCrashedError` if the loop died (before or
  after the submission), or `EngineStoppedError`.
- An unexpected exception ends the loop: the engine's books may be wrong, so nothing more is sampled by it. `on_crash`
  hears of it after every future has failed; its owner restarts the process, and callers ask again.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from odradek.actors.inference.engine import Engine, StepOutput
from odradek.actors.inference.errors import EngineCrashedError, EngineStoppedError, InferenceError
from odradek.actors.inference.types import SampleRequest, SampleResult

IDLE_WAIT: Final = 1.0
"""Seconds of one idle wait. It only bounds how long a missed wake-up could last; lower costs wake-ups."""

T = TypeVar("T")
_log = logging.getLogger(__name__)


class EngineLoop:
    """Runs `make_engine()` and then steps it, in a thread of its own."""

    def __init__(
        self, make_engine: Callable[[], Engine], name: str, on_crash: Callable[[BaseException], None] | None = None
    ) -> None:
        self._make_engine = make_engine
        self._on_crash = on_crash
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[Engine], None], Future[None]]] = deque()
        self._ended: InferenceError | None = None
        self._stopping = False
        self._requests: dict[tuple[str, int], Future[SampleResult]] = {}
        """By (request id, epoch): a new owner may ask under the id of the request it supersedes."""
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        return self._ended is None

    def submit(self, request: SampleRequest) -> Future[SampleResult]:
        """Queue a request; the future fails with what `Engine.add` raises."""
        future: Future[SampleResult] = Future()

        def add(engine: Engine) -> None:
            engine.add(request)
            self._requests[request.request_id, request.epoch] = future

        self._post(add).add_done_callback(lambda done: _pass_error(done, future))
        return future

    def call(self, command: Callable[[Engine], T]) -> Future[T]:
        """Run `command` between two steps."""
        future: Future[T] = Future()

        def run(engine: Engine) -> None:
            if future.set_running_or_notify_cancel():  # a caller that gave up does not get it done behind its back
                future.set_result(command(engine))

        self._post(run).add_done_callback(lambda done: _pass_error(done, future))
        return future

    def stop(self, timeout: float) -> bool:
        """Fail what is in flight with `EngineStoppedError`; True if the thread has ended within `timeout` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _post(self, command: Callable[[Engine], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._wake:
            if self._ended is None:
                self._inbox.append((command, future))
                self._wake.notify()
                return future
        future.set_exception(self._ended)
        return future

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            while self._await_work(engine):
                self._handle_commands(engine)
                if not engine.idle:
                    self._deliver(engine.step())
        except Exception as e:
            _log.exception("the engine loop died; every request in flight fails as retryable")
            self._end(EngineCrashedError(f"the engine loop died of {type(e).__name__}: {e}; ask another replica"))
            if self._on_crash is not None:
                self._on_crash(e)
        else:
            self._end(EngineStoppedError("the engine was stopped; ask another replica"))

    def _await_work(self, engine: Engine) -> bool:
        with self._wake:
            while engine.idle and not self._inbox and not self._stopping:
                self._wake.wait(IDLE_WAIT)
            return not self._stopping

    def _handle_commands(self, engine: Engine) -> None:
        while True:
            with self._wake:
                if not self._inbox:
                    return
                command, future = self._inbox.popleft()
            try:
                command(engine)
            except InferenceError as e:
                future.set_exception(e)
            except Exception as e:
                future.set_exception(EngineCrashedError(f"the engine loop died of {type(e).__name__}: {e}"))
                raise
            else:
                future.set_result(None)
            # At once, not with the next step: the next command may ask under an id that has just left.
            self._deliver(engine.take_left())

    def _deliver(self, out: StepOutput) -> None:
        for result in out.finished:
            self._requests.pop((result.request_id, result.epoch)).set_result(result)
        for request, error in out.failed:
            self._requests.pop((request.request_id, request.epoch)).set_exception(error)

    def _end(self, error: InferenceError) -> None:
        with self._wake:
            self._ended = error
            commands, self._inbox = list(self._inbox), deque()
        for _, command in commands:
            command.set_exception(error)
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.set_exception(error)


def _pass_error(done: Future[None], future: Future[T]) -> None:
    error = done.exception()
    if error is not None and not future.done():
        future.set_exception(error)
