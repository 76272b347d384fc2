"""What the actors say of themselves, asked over Ray: for `watch` and the metrics page.

Asks `state()` (`status()` of session actors) of each named actor. A look waits `ASK_S`; a slower actor (a trainer in
the middle of a step holds its interpreter for seconds) is shown with its last answer until it gives the next, and as
silent from `SILENT_S` on. Utilisation is work per second between two answers. Owns nothing, changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

ASK_S = 2.0
"""Seconds one look waits for answers. Too low shows every state late; too high delays the picture."""
SILENT_S = 20.0
"""Seconds without an answer from which an actor counts as down. Too low calls busy ones dead."""


class ActorView(msgspec.Struct, frozen=True):
    """One actor at one look."""

    name: str
    up: bool
    work_rate: float | None = None
    """Seconds of work per second between its two newest answers (parallel work adds up); None where it counts none."""
    state: dict[str, Any] = {}
    """Its newest answer."""
    note: str = ""
    """Why it is down, why it does nothing though it is up, or that the answer is old."""
    asked: bool = False
    """It has not answered its first question yet, and not had `SILENT_S` for it: nobody knows whether it is down."""
    unanswered_s: float = 0.0
    """How long it has owed an answer, where that is all that is known against it."""


class NotRunning(Exception):
    """There is no actor of that name."""


Ask = Callable[[str], Awaitable[Mapping[str, Any]]]


@dataclasses.dataclass(slots=True)
class _Known:
    """What one actor last said."""

    asked: float = 0.0
    answered: float | None = None
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    work_rate: float | None = None
    fault: str = ""
    pending: asyncio.Task[Mapping[str, Any]] | None = None


class ActorWatcher:
    """Remembers the last answers, so that a counter of busy seconds becomes a rate and a slow actor is not a dead one.
    Use it on one event loop."""

    def __init__(self, names: Iterable[str], ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.names = list(names)
        self._ask = ask
        self._clock = clock
        self._known = {name: _Known() for name in self.names}

    async def look(self, wait_s: float = ASK_S) -> list[ActorView]:
        """All actors, asked at the same time."""
        for name, known in self._known.items():
            if known.pending is None:
                known.asked = self._clock()
                known.pending = asyncio.ensure_future(self._ask(name))
        pending = [known.pending for known in self._known.values() if known.pending is not None]
        if pending:
            await asyncio.wait(pending, timeout=wait_s)
        return [self._view(name, known) for name, known in self._known.items()]

    async def close(self) -> None:
        """Stop waiting for answers."""
        pending = [known.pending for known in self._known.values() if known.pending is not None]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _view(self, name: str, known: _Known) -> ActorView:
        if known.pending is not None and known.pending.done():
            self._take(known, known.pending)
        if known.fault:
            return ActorView(name, False, note=known.fault)
        waits = self._clock() - known.asked if known.pending is not None else 0.0
        if known.answered is None or waits >= SILENT_S:
            asked = known.answered is None and waits < SILENT_S
            note = f"no answer for {waits:.0f} s"
            return ActorView(name, False, note=note, asked=asked, unanswered_s=waits)
        note = f"its answer of {self._clock() - known.answered:.0f} s ago" if known.pending is not None else ""
        note = str(known.state.get("fault") or known.state.get("refused") or note)
        return ActorView(name, True, known.work_rate, known.state, note)

    def _take(self, known: _Known, done: asyncio.Task[Mapping[str, Any]]) -> None:
        known.pending = None
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None:
            # Whatever is wrong with it, it does not answer: that is what a viewer needs to see.
            known.fault = "not running" if isinstance(error, NotRunning) else type(error).__name__
            known.answered, known.work_rate = None, None
            return
        now, state = self._clock(), dict(done.result())
        busy, before = state.get("busy_s"), known.state.get("busy_s")
        known.work_rate = None
        if isinstance(busy, int | float) and isinstance(before, int | float) and known.answered is not None:
            elapsed = now - known.answered
            if busy >= before and elapsed > 0:
                known.work_rate = (busy - before) / elapsed
        known.fault, known.answered, known.state = "", now, state


def ray_ask(namespace: str, handles: Mapping[str, Any] | None = None) -> Ask:
    """Asks named Ray actors; the process must be connected. `handles` saves the look-up by name."""
    import ray

    async def ask(name: str) -> Mapping[str, Any]:
        handle: Any = (handles or {}).get(name)
        if handle is None:
            try:
                handle = await asyncio.to_thread(ray.get_actor, name, namespace)
            except ValueError:
                raise NotRunning(name) from None
        answer = await (handle.status if name.startswith("session-") else handle.state).remote()
        if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
            return dataclasses.asdict(answer)
        if isinstance(answer, msgspec.Struct):
            found: dict[str, Any] = msgspec.structs.asdict(answer)
            return found
        return dict(answer)

    return ask
