"""The session actor: a fixed host of many sessions; a thin shell round `SessionRunner`.

Owns: which sessions run here, and nothing that the log does not know. A session is opened by id; opening it again
while it runs does nothing, after a crash it is folded from the log and resumed. A restarted actor has a new boot id,
by which the controller sees that everything placed here must be placed again.

A person's session is never refused or queued for what runs here already: rollouts are bounded where they are admitted
(`controller/core.py`), and what production reads and writes has places of its own (test_production_first.py).

Consumes: Ray calls (open, post, cancel). Produces: sessions.v1. Waits for: the engine, the environment and the log,
each within the runner's deadlines. Never retried by Ray (`max_task_retries=0`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.runtime.deployment import Deployment, actor_handle
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import log_of
from odradek.actors.session.clients import KafkaJournal, RayEngine, RayEnvironment
from odradek.actors.session.runner import SessionRunner, SessionSpec
from odradek.actors.telemetry.tracing import Tracing
from odradek.actors.tools.redact import redact
from odradek.actors.tools.registry import TOOLS
from odradek.streams.events.sessions import CancelRequested, MessageReceived
from odradek.streams.ownership import SessionRecord
from odradek.streams.priority import serving

log = logging.getLogger(__name__)

START_DEADLINE_S = 60.0
"""Seconds to reach the broker and find the other actors."""


Histories = asyncio.Task[dict[str, list[SessionRecord]]]
"""What the log has of the sessions that were handed over together."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What the controller needs to know of a host of sessions."""

    boot_id: str
    active: list[str]
    oldest_wait_s: float
    oldest_wait_for: str
    finished: int


class SessionActor:
    """Ray actor class; also usable as a plain object in tests."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._name = name
        self._boot_id = str(uuid.uuid4())
        self._runners: dict[str, SessionRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._finished = 0
        self._template = XmlTemplate(Tokenizer.from_file(Path(deployment.tokenizer_file)))
        self._effects = {tool.name: tool.effect for tool in TOOLS.values()}
        self._loop = LoopThread(name)
        self._loop.begin(self._start(), START_DEADLINE_S)

    async def _start(self) -> None:
        self._log = log_of(self._deployment)
        await self._log.start()
        namespace = self._deployment.namespace
        engines = [actor_handle(f"inference-{i}", namespace) for i in range(self._deployment.inference_actors)]
        self._engine = RayEngine(engines, self._deployment.token_seconds)
        self._environment = RayEnvironment(actor_handle("environment-0", namespace))
        self._tracing = Tracing.of(self._deployment.otlp_endpoint, self._name, redact)
        self._journal = KafkaJournal(self._log, self._name, self._tracing.traceparent)

    # -- Ray's methods -----------------------------------------------------------------------------------------

    async def open(self, specs: list[SessionSpec]) -> None:
        """Run these sessions; those that already run here are left alone."""
        await self._loop.call(self._open(specs))

    async def post(self, session_id: str, body: MessageReceived | CancelRequested) -> bool:
        """Give a running session an input; False if it does not run here."""
        return await self._loop.call(self._post(session_id, body))

    async def status(self) -> HostStatus:
        """Cheap; asked several times a second."""
        return await self._loop.call(self._status())

    # -- on the actor's own loop -------------------------------------------------------------------------------

    async def _open(self, specs: list[SessionSpec]) -> None:
        taken = [spec for spec in specs if spec.session_id not in self._tasks]
        floors = {spec.session_id: spec.history_floor for spec in taken if spec.history_floor is not None}
        with serving(all(_of_production(spec) for spec in taken)):
            histories = asyncio.create_task(self._journal.read_many(floors)) if floors else None
        for spec in taken:
            runner = SessionRunner(
                spec,
                template=self._template,
                effects=self._effects,
                journal=self._journal,
                engine=self._engine,
                environment=self._environment,
                observe=self._tracing.observe,
            )
            self._runners[spec.session_id] = runner
            self._tasks[spec.session_id] = asyncio.create_task(self._run(runner, histories))

    async def _run(self, runner: SessionRunner, histories: Histories | None) -> None:
        session_id = runner.spec.session_id
        try:
            found = await asyncio.shield(histories) if histories is not None else {}
            if runner.spec.history_floor is not None and session_id not in found:
                return  # a newer release's: the journal has said so, and a build that knows it goes on with it
            history = found.get(session_id, [])
            self._tracing.restore(session_id, history)
            with serving(_of_production(runner.spec)):
                await runner.run(history)
        except Exception:
            log.exception("session %s: unexpected error; its actor is restarted by the next placement", session_id)
        finally:
            self._finished += 1
            self._runners.pop(session_id, None)
            self._tasks.pop(session_id, None)

    async def _post(self, session_id: str, body: MessageReceived | CancelRequested) -> bool:
        runner = self._runners.get(session_id)
        if runner is None:
            return False
        with serving(_of_production(runner.spec)):
            await runner.post(body)
        return True

    async def _status(self) -> HostStatus:
        now = time.monotonic()
        waits = [(now - r.waiting_for.since, f"{sid}: {r.waiting_for.what}") for sid, r in self._runners.items()]
        oldest = max(waits, default=(0.0, ""))
        return HostStatus(self._boot_id, list(self._tasks), oldest[0], oldest[1], self._finished)


def _of_production(spec: SessionSpec) -> bool:
    return spec.origin == "production"
