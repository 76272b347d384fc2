"""Waiting for what real services bring about: a condition, a deadline that only a failure reaches, and a name for it.

A broker, a sandbox or a page has no event that a test could await, so these look again and again; no test's result
depends on how often.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")

SECONDS = 60.0
"""Deadline of a wait. Longer than anything here takes on a busy machine."""
LOOK_S = 0.05
"""Seconds between two looks."""


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    what: str,
    seconds: float = SECONDS,
    watched: "asyncio.Task[None] | None" = None,
) -> T:
    """The first true result of `condition`, awaited where it can be. When `watched` ends, its error ends the wait."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        found = cast(T, await result if inspect.isawaitable(result) else result)
        if found:
            return found
        if watched is not None and watched.done():
            watched.result()
            raise AssertionError(f"{watched.get_name()} returned before {what}")
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}, found {found!r}"
        await asyncio.sleep(LOOK_S)


def eventually_blocking(condition: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """The same without an event loop."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}, found {found!r}"
        time.sleep(LOOK_S)
    return found
