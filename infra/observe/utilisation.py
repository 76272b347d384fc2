"""How busy each part of the loop was over time, from the durations that its events carry. Pure.

A value is seconds of work per second in a bin: 1 is one thing at a time, 3.5 is three to four side by side on average.
Work lies where its event says: it ended when the event was logged and took as long as the event states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.sessions import SessionBook

MINUTE_S = 60.0
SHORT_RUN_S = 360.0
"""Seconds below which a run is cut into tenths of a minute: whole minutes would leave too few points."""
MAX_BINS = 240
"""Most points of a curve; a longer log gets wider bins. More can't be told apart on a page."""

Interval = tuple[float, float]
"""Seconds since 1970: begin and end."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Curves over one time axis."""

    start_s: float
    bin_s: float
    curves: dict[str, list[float]]
    """By what is measured, one value a bin."""


def utilisation(fold: RunFold, book: SessionBook) -> Utilisation:
    """Sampling, waiting for sampling, tools, grading and training."""
    work: dict[str, list[Interval]] = {
        "sampling": [],
        "waiting for the engine": [],
        "tool calls": [],
        "grading": [],
        "training": [],
    }
    for note in book.sessions.values():
        for turn in note.turns:
            end = book.time(note, turn.at) / 1000
            began = end - (turn.prefill_ms + turn.decode_ms) / 1000
            work["sampling"].append((began, end))
            work["waiting for the engine"].append((began - turn.queue_ms / 1000, began))
        for call in note.calls:
            if call.done_at >= 0:
                end = book.time(note, call.done_at) / 1000
                work["tool calls"].append((end - call.duration_ms / 1000, end))
    for grading in fold.gradings:
        end = fold.clocks["rewards.v1", grading.partition].time(grading.at) / 1000
        work["grading"].append((end - grading.milliseconds / 1000, end))
    for step in fold.steps:
        work["training"].append((step.time_ms / 1000 - step.seconds, step.time_ms / 1000))
    return _binned(work)


def _binned(work: dict[str, list[Interval]]) -> Utilisation:
    every = [interval for intervals in work.values() for interval in intervals]
    if not every:
        return Utilisation(0.0, MINUTE_S, {})
    start, end = min(begin for begin, _ in every), max(end for _, end in every)
    bin_s = MINUTE_S / 6 if end - start < SHORT_RUN_S else MINUTE_S
    while (end - start) / bin_s > MAX_BINS:
        bin_s *= 2
    count = int((end - start) // bin_s) + 1
    widths = [bin_s] * (count - 1) + [max(1.0, end - start - (count - 1) * bin_s)]
    curves = {name: _spread(intervals, start, bin_s, widths) for name, intervals in work.items()}
    return Utilisation(start, bin_s, curves)


def _spread(intervals: Iterable[Interval], start: float, bin_s: float, widths: list[float]) -> list[float]:
    """Each interval's seconds, shared out over the bins it covers; the last bin ends with the last event."""
    totals = [0.0] * len(widths)
    for begin, end in intervals:
        first, last = int((begin - start) // bin_s), int((end - start) // bin_s)
        for index in range(max(0, first), min(len(widths) - 1, last) + 1):
            low, high = start + index * bin_s, start + (index + 1) * bin_s
            totals[index] += max(0.0, min(end, high) - max(begin, low))
    return [total / width for total, width in zip(totals, widths, strict=True)]
