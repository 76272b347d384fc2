"""Small charts as inline SVG: no script, no network, colours from the page's CSS (`fill1` … `fill8`).

Pure: numbers in, markup out. The drawing area is 380 units wide, so that its text stays legible on a phone and a card
of twice that width still looks right. Each mark carries a <title>, which browsers show under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 380, 214
DODGE = 6.0
"""Units between marks of different series at the same place, so that none hides another."""
INSET = 10
"""Units between the axes and the first and last mark: marks that are moved aside stay off the axis' numbers."""
LEFT, RIGHT, TOP, BOTTOM = 44, 18, 8, 36
TICKS = 5
"""About how many marks an axis gets. Fewer can't be read off; more overlap on a phone."""

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Point:
    """One mark; `low` and `high` draw its interval."""

    x: float
    y: float
    title: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour, joined by a line unless there is nothing between them to claim."""

    name: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale: its label, and where it must begin or end."""

    label: str
    low: float | None = None
    high: float | None = None
    show: Format = field(default=lambda value: compact(value))


def compact(value: float) -> str:
    """As few characters as tell the number: 0.25, 12, 3.4k, 1.2M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers that cover [low, high]."""
    if high <= low:
        high = low + 1.0
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


class _Plot:
    """Maps values to drawing units and collects marks."""

    def __init__(self, x: Axis, y: Axis, xs: Sequence[float], ys: Sequence[float], label: str) -> None:
        self.x_ticks = ticks(*_range(x, xs))
        self.y_ticks = ticks(*_range(y, ys))
        self._x, self._y, self._label = x, y, label
        self.marks: list[str] = []
        self.legend: list[str] = []

    def px(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return LEFT + INSET + (WIDTH - LEFT - RIGHT - 2 * INSET) * (value - low) / (high - low)

    def py(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / (high - low)

    def name(self, names: Sequence[str]) -> None:
        """A legend above the drawing; a single series needs none, its card's heading says what it is."""
        if len(names) > 1:
            self.legend = [f'<span class="key{number}">{escape(name)}</span>' for number, name in enumerate(names, 1)]

    def svg(self) -> str:
        legend = f'<div class="legend">{"".join(self.legend)}</div>' if self.legend else ""
        return (
            f'{legend}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._label)}">'
            + "".join(self._axes())
            + "".join(self.marks)
            + "</svg>"
        )

    def _axes(self) -> list[str]:
        floor = HEIGHT - BOTTOM
        parts = []
        for value in self.y_ticks:
            y = self.py(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:.1f}" class="end">{escape(self._y.show(value))}</text>')
        for value in self.x_ticks:
            parts.append(
                f'<text x="{self.px(value):.1f}" y="{floor + 14}" class="mid">{escape(self._x.show(value))}</text>'
            )
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor}" y2="{floor}" class="axis"/>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 6}" class="mid soft">{escape(self._x.label)}</text>')
        return parts


def _range(axis: Axis, values: Sequence[float]) -> tuple[float, float]:
    low = axis.low if axis.low is not None else min(values, default=0.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    return low, high


def xy(series: Sequence[Series], x: Axis, y: Axis, label: str) -> str:
    """Lines and points, each point with its interval. `label` describes the picture to a screen reader."""
    points = [point for one in series for point in one.points]
    if not points:
        return nothing(label)
    bounds = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    plot = _Plot(x, y, [point.x for point in points], bounds, label)
    for number, one in enumerate(series, 1):
        aside = 0.0 if one.joined else DODGE * (number - (len(series) + 2) / 2)
        places = [(plot.px(p.x) + aside, plot.py(p.y)) for p in one.points]
        if one.joined and len(places) > 1:
            path = " ".join(f"{x_:.1f},{y_:.1f}" for x_, y_ in places)
            plot.marks.append(f'<polyline points="{path}" class="line{number}"/>')
        for point, (px, py) in zip(one.points, places, strict=True):
            if point.low is not None and point.high is not None:
                low, high = plot.py(point.low), plot.py(point.high)
                plot.marks.append(
                    f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{low:.1f}" y2="{high:.1f}" class="whisker{number}"/>'
                )
            plot.marks.append(
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{2.4 if one.joined else 4}" class="fill{number}">'
                f"<title>{escape(point.title)}</title></circle>"
            )
    plot.name([one.name for one in series])
    return plot.svg()


def area(points: Sequence[tuple[float, float]], x: Axis, y: Axis, label: str) -> str:
    """One quantity over time, filled down to 0."""
    if not points:
        return nothing(label)
    plot = _Plot(x, y, [a for a, _ in points], [0.0, *(b for _, b in points)], label)
    floor = plot.py(0.0)
    path = " ".join(f"{plot.px(a):.1f},{plot.py(b):.1f}" for a, b in points)
    first, last = plot.px(points[0][0]), plot.px(points[-1][0])
    plot.marks.append(f'<polygon points="{first:.1f},{floor:.1f} {path} {last:.1f},{floor:.1f}" class="area1"/>')
    plot.marks.append(f'<polyline points="{path}" class="line1"/>')
    return plot.svg()


def histogram(groups: Sequence[tuple[str, Sequence[float]]], x: Axis, bins: int, label: str) -> str:
    """Shares by bin of each named sample, side by side: distributions of different sizes can be compared."""
    filled = [(name, list(values)) for name, values in groups]
    everything = [value for _, values in filled for value in values]
    if not everything:
        return nothing(label)
    edges = ticks(0.0 if x.low is None else x.low, max(everything), bins)
    step = edges[1] - edges[0]
    shares = []
    for _, values in filled:
        counts = [0] * (len(edges) - 1)
        for value in values:
            counts[min(len(counts) - 1, max(0, int((value - edges[0]) / step)))] += 1
        shares.append([count / len(values) if values else 0.0 for count in counts])
    top = max(share for one in shares for share in one)
    plot = _Plot(Axis(x.label, edges[0], edges[-1], x.show), Axis("", 0.0, top, percent), [], [], label)
    for number, ((name, values), one) in enumerate(zip(filled, shares, strict=True), 1):
        for index, share in enumerate(one):
            width = (plot.px(edges[1]) - plot.px(edges[0]) - 2) / len(filled)
            left = plot.px(edges[index]) + 1 + width * (number - 1)
            title = (
                f"{name}: {percent(share)} of {len(values)} from {x.show(edges[index])} to {x.show(edges[index + 1])}"
            )
            plot.marks.append(_bar(left, plot.py(share), width, plot.py(0.0), number, title))
    plot.name([f"{name} ({len(values)})" for name, values in filled])
    return plot.svg()


def columns(values: Sequence[tuple[str, float, str]], x_label: str, y: Axis, label: str) -> str:
    """One column a named value: (name, value, title)."""
    if not values:
        return nothing(label)
    plot = _Plot(Axis(x_label, 0.0, float(len(values)), lambda _v: ""), y, [], [0.0, *(v for _, v, _ in values)], label)
    plot.x_ticks = [0.0, float(len(values))]
    width = (WIDTH - LEFT - RIGHT) / len(values)
    for index, (name, value, title) in enumerate(values):
        left = LEFT + width * index
        plot.marks.append(_bar(left + 0.15 * width, plot.py(value), 0.7 * width, plot.py(0.0), 1, title))
        plot.marks.append(
            f'<text x="{left + width / 2:.1f}" y="{HEIGHT - BOTTOM + 14}" class="mid">{escape(name)}</text>'
        )
    return plot.svg()


def _bar(left: float, top: float, width: float, floor: float, number: int, title: str) -> str:
    height = max(0.0, floor - top)
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{max(0.5, width):.1f}" height="{height:.1f}" class="fill{number}">'
        f"<title>{escape(title)}</title></rect>"
    )


def nothing(label: str) -> str:
    """In place of a chart without data."""
    return f'<p class="none" role="img" aria-label="{escape(label)}: nothing on the log">nothing on the log yet</p>'
