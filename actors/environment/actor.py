"""The environment actor: the sandboxes of one host, and the ten tools that act on them.

Owns every live sandbox by session and epoch. A call of an older epoch than the newest seen is refused; opening under
a newer epoch first ends the older one's sandbox and whatever still runs in it. Produces no events: it answers, and the
session logs. Its death takes all sandboxes with it (the driver's rule); sessions then rebuild from the log.

Production is never queued behind rollouts: not to have its sandbox made, not for a sandbox to live in, not to run a
command, search or read a file (test_production_sandbox.py, test_production_first.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from odradek.actors.environment.errors import SandboxGoneError, SandboxSucceededError
from odradek.actors.environment.logged import to_logged
from odradek.actors.environment.protocol import Sandbox
from odradek.actors.environment.start import SandboxFactory, end_with, ns_driver
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import blobs_of
from odradek.actors.session.ports import Call, CallOutcome, EnvironmentInfo, WorkspaceStart
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import TOOLS, run_call
from odradek.actors.tools.sandbox_workspace import SandboxWorkspace
from odradek.sandbox_images.store import ImageStore
from odradek.streams.events.sessions import WorkspaceDelta
from odradek.streams.faults import reach
from odradek.streams.priority import serving

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
"""Seconds for preflight and building the default image."""
TOO_DEEP = "error: the command left folders nested too deep to be recorded; everything it changed was undone"
COMMAND = "run_terminal"
"""The tool that starts processes: so many at once as `Deployment.max_commands` allows."""


@dataclass(slots=True)
class _Place:
    """One session's sandbox."""

    epoch: int
    sandbox: Sandbox
    workspace: SandboxWorkspace
    start: WorkspaceStart
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    skipped: set[str] = field(default_factory=set)
    """What no delta could carry and an event has named."""


class EnvironmentActor:
    """Ray actor class; also usable as a plain object in tests."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._name = name
        self._places: dict[str, _Place] = {}
        self._epochs: dict[str, int] = {}
        self._calls = 0
        self._busy_s = 0.0
        self._running = asyncio.Semaphore(deployment.max_commands)
        self._opening = asyncio.Semaphore(deployment.max_commands)
        self._loop = LoopThread(name)
        self._loop.begin(self._start(), START_DEADLINE_S)
        self._loop.main(end_with(self._driver), name)

    async def _start(self) -> None:
        root = Path(self._deployment.data_dir)
        self._images = ImageStore(root / "images")
        self._driver = ns_driver(self._deployment, self._name, self._images)
        self._blobs = blobs_of(self._deployment)
        self._factory = SandboxFactory(self._driver, self._images, self._blobs)
        await self._factory.image_digest("demo")
        await self._driver.start()

    # -- Ray's methods -----------------------------------------------------------------------------------------

    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        """A sandbox in the logged state for this owner; an older owner's is ended first."""
        return await self._loop.call(self._open(session_id, epoch, start, deltas))

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        """One outcome a call, in order; several calls run together. A command is ended after `tool_seconds`."""
        return await self._loop.call(self._run_calls(session_id, epoch, calls, tool_seconds))

    async def close(self, session_id: str, epoch: int) -> None:
        """End the session's sandbox. Twice is once."""
        await self._loop.call(self._close(session_id, epoch))

    async def shut_down(self) -> None:
        """End every sandbox; nothing of this actor is left on the host."""
        await self._loop.call(self._driver.close())

    async def state(self) -> dict[str, Any]:
        """Counters for `status` and `watch`."""
        return {"live": len(self._places), "calls": self._calls, "busy_s": self._busy_s}

    # -- on the actor's own loop -------------------------------------------------------------------------------

    def _check_epoch(self, session_id: str, epoch: int) -> None:
        newest = self._epochs.get(session_id, epoch)
        if epoch < newest:
            raise SandboxSucceededError(f"session {session_id}: epoch {epoch} has been succeeded by {newest}")
        self._epochs[session_id] = epoch

    async def _open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        self._check_epoch(session_id, epoch)
        await self._end(session_id)
        with serving(start.production):
            async with nullcontext() if start.production else self._opening:
                sandbox = await self._factory.open(start, deltas, label=session_id)
        await reach("environment.box_opened")
        if self._epochs.get(session_id) != epoch:
            await sandbox.destroy()
            raise SandboxSucceededError(f"session {session_id}: epoch {epoch} was succeeded while its sandbox was made")
        await self._end(session_id)  # the same owner asked twice: its first request took too long for it
        self._places[session_id] = _Place(epoch, sandbox, SandboxWorkspace(sandbox, epoch), start)
        return EnvironmentInfo(sandbox.sandbox_id, "ns", await self._factory.image_digest(start.image))

    async def _run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        self._check_epoch(session_id, epoch)
        place = self._places.get(session_id)
        if place is None or place.epoch != epoch:
            raise SandboxGoneError(f"session {session_id}: no sandbox of epoch {epoch} on this host")
        began = time.monotonic()
        limits = Limits(command_seconds=tool_seconds, command_seconds_max=tool_seconds)
        with serving(place.start.production):
            outcomes = await self._outcomes(session_id, place, calls, limits)
        await reach("environment.call_ran")
        self._calls += len(calls)
        self._busy_s += time.monotonic() - began
        return outcomes

    async def _outcomes(
        self, session_id: str, place: _Place, calls: Sequence[Call], limits: Limits
    ) -> list[CallOutcome]:
        async with place.lock:
            outcomes = list(await asyncio.gather(*(self._one(place, call, limits) for call in calls)))
            if len(calls) == 1 and (spec := TOOLS.get(calls[0].name)) is not None and spec.leaves_delta:
                outcomes[0] = await self._with_delta(session_id, place, outcomes[0])
        return outcomes

    async def _with_delta(self, session_id: str, place: _Place, outcome: CallOutcome) -> CallOutcome:
        """The outcome with what the call changed. A change that can't be recorded is undone and the model is told:
        it was the call's doing, so it must neither pass as our fault nor live on unlogged."""
        try:
            changed = await place.sandbox.diff(incremental=True)
        except RecursionError:
            await self._end(session_id)  # the next call finds no sandbox, and the session rebuilds it from the log
            return replace(outcome, text=TOO_DEEP, is_error=True)
        unnamed = tuple(name for name in changed.skipped if name not in place.skipped)
        place.skipped.update(unnamed)
        if unnamed:
            log.warning("session %s: %d things a delta can't carry: %s", session_id, len(unnamed), unnamed[0])
        delta = await to_logged(msgspec.structs.replace(changed, skipped=unnamed), self._blobs, place.start.subject)
        return replace(outcome, delta=delta) if delta.changes or delta.skipped else outcome

    async def _one(self, place: _Place, call: Call, limits: Limits) -> CallOutcome:
        began = time.monotonic()
        slot = self._running if call.name == COMMAND and not place.start.production else nullcontext()
        async with slot:
            outcome = await run_call(place.workspace, call.name, call.arguments, limits)
        return CallOutcome(outcome.text, outcome.is_error, None, (time.monotonic() - began) * 1000, outcome.redactions)

    async def _close(self, session_id: str, epoch: int) -> None:
        self._check_epoch(session_id, epoch)
        await self._end(session_id)
        self._epochs.pop(session_id, None)

    async def _end(self, session_id: str) -> None:
        place = self._places.pop(session_id, None)
        if place is not None:
            with serving(place.start.production):
                await place.sandbox.destroy()
