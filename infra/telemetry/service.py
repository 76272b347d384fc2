"""Telemetry of a deployment: a thread that follows the log and the actors, in an actor of its own (`actor.py`).

Owns: the metrics page, always; the spans of assembly and training, where an endpoint is set (sessions and gradings are
traced by their actors). It only looks: it writes nothing, and when the broker or an actor does not answer it keeps the
last picture, says so once, and goes on looking. Waits: `EVERY_S` between two looks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from prometheus_client.core import Metric

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.observe.actors import ActorWatcher, Ask
from odradek.infra.observe.follow import RunFollower, SessionFollower
from odradek.infra.observe.pending import Pending, pending
from odradek.infra.telemetry.batches import BatchSpans
from odradek.infra.telemetry.metrics import MetricsServer, collect
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two looks. Shorter than a scrape interval helps nobody; longer makes the page old."""
STOP_S = 10.0
"""Seconds the thread gets to end its look and close its connections."""


class TelemetryService:
    """See the module. `start` returns once the page is served; its first picture follows."""

    def __init__(self, deployment: Deployment, names: Sequence[str], ask: Ask) -> None:
        self._deployment = deployment
        self._names, self._ask = list(names), ask
        self._newest: Sequence[Metric] = ()
        self.waits: Sequence[Pending] = ()
        """What waited at the newest look, the oldest first."""
        self._server = MetricsServer(lambda: self._newest)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="telemetry", daemon=True)
        self._failing = False

    def start(self, port: int | None = None) -> str:
        """Returns the address of the metrics page."""
        address = self._server.start(port)
        self._thread.start()
        return address

    def stop(self) -> None:
        """End the thread and the page."""
        self._stopping.set()
        self._thread.join(STOP_S)
        self._server.stop()

    def _main(self) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._follow())
            except Exception as error:  # a broker that restarts: the page keeps its last picture, its time says so
                if not self._failing:
                    log.warning("telemetry: %s: %s; looking again", type(error).__name__, error)
                self._failing = True
                self._stopping.wait(EVERY_S)

    async def _follow(self) -> None:
        watcher = ActorWatcher(self._names, self._ask)
        batches = BatchSpans.of(self._deployment.otlp_endpoint)
        try:
            async with EventLog(self._deployment.kafka) as event_log:
                run, sessions = RunFollower(event_log), SessionFollower(event_log)
                await sessions.begin_recent(await run.refresh())
                batches.skip(run.fold)
                while not self._stopping.is_set():
                    views = await watcher.look()
                    fold, book = await run.refresh(), await sessions.refresh()
                    book.prune()
                    now_ms = int(time.time() * 1000)
                    self._newest, self.waits = collect(fold, book, views, now_ms), pending(fold, book, now_ms)
                    batches.send(fold)
                    self._failing = False
                    await asyncio.to_thread(self._stopping.wait, EVERY_S)
        finally:
            await watcher.close()
            batches.close()
