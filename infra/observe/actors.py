"""What the actors say of themselves, asked over Ray: for `watch` and the metrics page.

Asks `state()` (`status()` of session actors) of each named actor within `ASK_S`; an actor that is absent or does not
answer is `up=False` and nothing waits for it. Utilisation is work per second between two looks. Owns nothing, changes
nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

ASK_S = 2.0
"""Seconds to wait for one actor's answer. Too low shows busy actors as gone; too high delays the picture."""


class ActorView(msgspec.Struct, frozen=True):
    """One actor at one look."""

    name: str
    up: bool
    work_rate: float | None = None
    """Seconds of work per second since the look before (parallel work adds up); None where the actor counts none."""
    state: dict[str, Any] = {}


Ask = Callable[[str], Awaitable[Mapping[str, Any]]]


class ActorWatcher:
    """Remembers the last look, so that a counter of busy seconds becomes a rate."""

    def __init__(self, names: Iterable[str], ask: Ask, clock: Callable[[], float] = time.monotonic) -> None:
        self.names = list(names)
        self._ask = ask
        self._clock = clock
        self._last: dict[str, tuple[float, float]] = {}

    async def look(self) -> list[ActorView]:
        """All actors, asked at the same time."""
        return list(await asyncio.gather(*(self._one(name) for name in self.names)))

    async def _one(self, name: str) -> ActorView:
        try:
            async with asyncio.timeout(ASK_S):
                state = dict(await self._ask(name))
        except Exception:  # whatever is wrong with it, it does not answer: that is what a viewer needs to see
            self._last.pop(name, None)
            return ActorView(name, False)
        return ActorView(name, True, self._rate(name, state.get("busy_s")), state)

    def _rate(self, name: str, busy_s: Any) -> float | None:
        if not isinstance(busy_s, int | float):
            return None
        now, before = self._clock(), self._last.get(name)
        self._last[name] = (now, float(busy_s))
        if before is None or busy_s < before[1] or now <= before[0]:
            return None
        return (float(busy_s) - before[1]) / (now - before[0])


def ray_ask(namespace: str, handles: Mapping[str, Any] | None = None) -> Ask:
    """Asks named Ray actors; the process must be connected. `handles` saves the look-up by name."""
    import ray

    async def ask(name: str) -> Mapping[str, Any]:
        handle: Any = (handles or {}).get(name) or await asyncio.to_thread(ray.get_actor, name, namespace)
        answer = await (handle.status if name.startswith("session-") else handle.state).remote()
        if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
            return dataclasses.asdict(answer)
        if isinstance(answer, msgspec.Struct):
            found: dict[str, Any] = msgspec.structs.asdict(answer)
            return found
        return dict(answer)

    return ask
