"""When things happened, though every stamp was written by somebody else's clock. Order follows the log, always.

`settle` looks at one partition's stamps in log order. Those that form the longest non-decreasing run are believed; a
stamp outside of it that differs from its believed neighbours by more than `TOLERANCE_MS` is flagged (`ahead` or
`behind`) and its record is placed in time where the log has it. So one sender's wrong clock can neither skew a window
nor make honest records late. A stamp in its reader's future is never believed: the end of a log has no later records to
contradict it. Pure; apart from that last rule any reader flags the same records.

Not promised: to tell which are wrong where they are the majority (then the others are flagged), nor that a first
stamp far in the past is one: nothing before it contradicts it, and it looks like a pause.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from odradek.streams.events.meta import RecordRef

TOLERANCE_MS = 60_000
"""Milliseconds a stamp may disagree with its neighbours. Too low flags retries and writers that race on one partition;
too high lets a wrong clock move records by whole minutes, the size of our windows."""

Flag = Literal["ahead", "behind"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """A record whose stamp is not believed."""

    ref: RecordRef
    stamp_ms: int
    placed_ms: int
    """Where the log has it."""
    flag: Flag


def settle(
    stamps: Sequence[int], *, reader_ms: int | None = None, tolerance_ms: int = TOLERANCE_MS
) -> tuple[list[int], dict[int, Flag]]:
    """Times to use, one a stamp, and by index the stamps that are not believed. `reader_ms` is the reader's now."""
    limit = None if reader_ms is None else reader_ms + tolerance_ms
    possible = [i for i, stamp in enumerate(stamps) if limit is None or stamp <= limit]
    believed = [possible[i] for i in _longest_run([stamps[i] for i in possible])]
    times: list[int] = []
    flags: dict[int, Flag] = {}
    following = iter([*believed, None])
    later = next(following)
    before: int | None = None
    for index, stamp in enumerate(stamps):
        if index == later:
            before, later = stamp, next(following)
            times.append(stamp)
            continue
        after = stamps[later] if later is not None else None
        if (after is not None and stamp > after + tolerance_ms) or (limit is not None and stamp > limit):
            flags[index] = "ahead"
        elif before is not None and stamp < before - tolerance_ms:
            flags[index] = "behind"
        place = before if before is not None else after
        times.append(stamp if index not in flags or place is None else place)
    return times, flags


def _longest_run(stamps: Sequence[int]) -> list[int]:
    """Indices of a longest non-decreasing subsequence (patience sorting, O(n log n))."""
    tails: list[int] = []
    tail_at: list[int] = []
    previous = array("q", [-1]) * len(stamps)
    for index, stamp in enumerate(stamps):
        place = bisect_right(tails, stamp)
        previous[index] = tail_at[place - 1] if place else -1
        if place == len(tails):
            tails.append(stamp)
            tail_at.append(index)
        else:
            tails[place], tail_at[place] = stamp, index
    run: list[int] = []
    index = tail_at[-1] if tail_at else -1
    while index >= 0:
        run.append(index)
        index = previous[index]
    return run[::-1]


@dataclass(slots=True)
class LogClock:
    """The stamps of one partition, kept while it is folded; settled when somebody asks."""

    topic: str
    partition: int
    offsets: array[int] = field(default_factory=lambda: array("q"))
    stamps: array[int] = field(default_factory=lambda: array("q"))
    reader_ms: int | None = None
    """The reader's own time when it last read."""
    _settled: tuple[list[int], dict[int, Flag]] = ([], {})

    def add(self, offset: int, stamp_ms: int) -> int:
        """Note one record, in log order; returns its index, by which its time is asked for."""
        self.offsets.append(offset)
        self.stamps.append(stamp_ms)
        return len(self.stamps) - 1

    def time(self, index: int) -> int:
        """When that record happened, milliseconds since 1970."""
        return self._settle()[0][index]

    def time_at(self, offset: int) -> int:
        """When the record at this offset happened; it must have been added."""
        return self.time(bisect_left(self.offsets, offset))

    def suspects(self) -> list[Suspect]:
        """Records whose stamps are not believed, in log order."""
        times, flags = self._settle()
        return [
            Suspect(RecordRef(self.topic, self.partition, self.offsets[i]), self.stamps[i], times[i], flag)
            for i, flag in sorted(flags.items())
        ]

    def _settle(self) -> tuple[list[int], dict[int, Flag]]:
        if len(self._settled[0]) != len(self.stamps):
            self._settled = settle(self.stamps, reader_ms=self.reader_ms)
        return self._settled
