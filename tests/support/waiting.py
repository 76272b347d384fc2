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
Condition = Callable[[], T | Awaitable[T]]

SECONDS = 60.0
"""Deadline of a wait. Longer than anything here takes on a busy machine."""
LOOK_S = 0.05
"""Seconds between two looks, where a look is cheap."""


async def eventually(
    condition: Condition[T],
    what: str,
    seconds: float = SECONDS,
    watched: "asyncio.Task[None] | None" = None,
    every: float = LOOK_S,
) -> T:
    """The first true result of `condition`, awaited where it can be. When `watched` ends, its error ends the wait."""

    async def look() -> T:
        result = condition()
        found = cast(T, await result if inspect.isawaitable(result) else result)
        if not found and watched is not None and watched.done():
            watched.result()
            raise AssertionError(f"{watched.get_name()} returned before {what}")
        return found

    found = await within(look, seconds, every)
    assert found, f"waited {seconds:g} s for {what}, found {found!r}"
    return found


async def within(condition: Condition[T], seconds: float, every: float = LOOK_S) -> T:
    """The first true result, or the last one where none is true in time: for whoever reports what it found instead."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        found = cast(T, await result if inspect.isawaitable(result) else result)
        if found or time.monotonic() >= end:
            return found
        await asyncio.sleep(every)


def eventually_blocking(condition: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """The same as `eventually` without an event loop."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}, found {found!r}"
        time.sleep(LOOK_S)
    return found


async def lasting(seconds: float) -> None:
    """Lets time pass, where that is what happens: how long a fault lasts, how fast a load comes. Nothing is waited for,
    and no assertion may depend on what others have done by then."""
    await asyncio.sleep(seconds)
