"""The newest record of a partition that somebody wants, found by reading backwards in doubling steps."""

from __future__ import annotations

from collections.abc import Callable

from odradek.streams.envelope import Record
from odradek.streams.log import EventLog

LOOK_BACK = 64
"""Offsets read first; doubled until it is found. Too few: many requests for what lies a little deeper. Too many: reads
what nobody wants when it lies at the end."""


async def newest(
    event_log: EventLog,
    topic: str,
    number: int,
    accept: Callable[[Record], bool],
    *,
    end: int | None = None,
    within: int | None = None,
) -> Record | None:
    """The last committed record before `end` (the stable end unless given) that `accept` takes, at most `within`
    offsets back; None if there is none. Reads each offset once."""
    first = await event_log.beginning(topic, number)
    if end is None:
        end = await event_log.stable_end(topic, number)
    if within is not None:
        first = max(first, end - within)
    span = LOOK_BACK
    while end > first:
        start = max(first, end - span)
        found: Record | None = None
        async for record in event_log.read(topic, number, start, end):
            if accept(record):
                found = record
        if found is not None:
            return found
        end, span = start, span * 2
    return None
