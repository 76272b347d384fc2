"""One self-contained HTML page about a run, from the log alone: no script, no network, no other file.

`render` is pure: the same folds give the same page but for the time of writing. Every chart and table says beneath it
what its numbers count. Charts come from `charts.py`, the page from `report.html.j2`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from odradek.infra.observe.charts import Axis, Point, Series, area, columns, compact, histogram, percent, xy
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.frame import Rate, VersionRow, rate_of, version_rows
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.observe.utilisation import utilisation
from odradek.infra.shown import clean

SUSPECTS_SHOWN = 20
"""Records with unbelieved clocks that are listed; the rest is counted."""
BATCHES_SHOWN = 200
"""Newest batches in the table. More make the page slow on a phone."""
LENGTH_BINS = 10


@dataclass(frozen=True, slots=True)
class Card:
    """One chart with its heading and what it counts."""

    heading: str
    svg: Markup
    counts: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline number."""

    value: str
    label: str
    note: str = ""


def render(fold: RunFold, book: SessionBook, written_ms: int, lane: str | None = None) -> str:
    """The page; `lane`: whose folds these are, if not the whole log's."""
    rows = version_rows(fold)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title="Odradek: what this log shows" + (f" of lane {lane}" if lane is not None else ""),
            written=_when(written_ms),
            span=_span(fold, book),
            tiles=_tiles(fold, book),
            learning=_learning(fold, rows),
            conduct=_conduct(rows),
            busy=_busy(fold, book),
            selection=_selection(fold),
            rows=rows,
            sets=sorted({name for row in rows for name in row.held_out}),
            events=_events(fold, book),
            groups=_groups(fold),
            batches=_batches(fold),
            hidden_batches=max(0, len(fold.batches) - BATCHES_SHOWN),
            clocks=_clocks(fold, book),
            suspect_count=len(_suspects(fold, book)),
            ignored=book.ignored,
        )
    )
    return clean(page)


@cache
def _environment() -> jinja2.Environment:
    source = files("odradek.infra.observe").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.DictLoader({"report.html.j2": source}), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["percent"] = percent
    environment.filters["compact"] = compact
    environment.filters["interval"] = _interval
    return environment


def _interval(rate: Rate) -> str:
    return f"{percent(rate.rate)} ({100 * rate.low:.0f}–{100 * rate.high:.0f}; {rate.solved} of {rate.count})"


def _when(ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ms / 1000))


def _span(fold: RunFold, book: SessionBook) -> str:
    clocks = [*fold.clocks.values(), *book.clocks.values()]
    times = [clock.time(i) for clock in clocks for i in (0, len(clock.stamps) - 1) if clock.stamps]
    if not times:
        return "an empty log"
    records = sum(len(clock.stamps) for clock in clocks)
    return f"{records:,} records from {_when(min(times))} to {_when(max(times))}"


def _tiles(fold: RunFold, book: SessionBook) -> list[Tile]:
    tiles = []
    for name in sorted({name for _, name in fold.evaluations}):
        versions = sorted(version for version, other in fold.evaluations if other == name)
        first, last = (rate_of(fold.evaluations[v, name]) for v in (versions[0], versions[-1]))
        value = percent(last.rate) if len(versions) == 1 else f"{percent(first.rate)} → {percent(last.rate)}"
        note = f"version {versions[0]}: {_interval(first)}"
        if len(versions) > 1:
            note += f"; version {versions[-1]}: {_interval(last)}"
        tiles.append(Tile(value, f"solved, held out: {name.replace('_', ' ') or 'no set'}", note))
    ended = Counter(note.end for note in book.sessions.values())
    failed = f"{ended['failed']} ended by a fault of ours" if ended["failed"] else "none ended by a fault of ours"
    calls = sum(len(note.calls) for note in book.sessions.values())
    tokens = sum(note.sampled_tokens for note in book.sessions.values())
    return [
        *tiles,
        Tile(str(len(fold.published)), "weight versions published", f"{len(fold.steps)} training steps committed"),
        Tile(f"{len(book.sessions):,}", "sessions opened", failed),
        Tile(f"{calls:,}", "tool calls asked for", f"{book.finished_calls:,} with a logged result"),
        Tile(compact(tokens), "tokens sampled", "in all sessions, evaluations included"),
    ]


# -- learning ----------------------------------------------------------------------------------------------------


def _learning(fold: RunFold, rows: list[VersionRow]) -> list[Card]:
    """Solve rate and reward against version, sampled tokens and training time."""
    tokens = _before(rows, {v: float(c.sampled_tokens) for v, c in fold.by_version.items()})
    seconds = _before(rows, {step.step - 1: step.seconds for step in fold.steps})
    axes: list[tuple[str, Axis, Callable[[int], float]]] = [
        ("weight version", Axis("weight version", show=_whole), float),
        ("sampled tokens", Axis("RL tokens sampled before the version was there", low=0.0), tokens.__getitem__),
        ("training time", Axis("training seconds before the version was there", low=0.0), seconds.__getitem__),
    ]
    solved, rewards = [], []
    for name, axis, place in axes:
        label = f"Solve rate against {name}"
        svg = xy(_solved(rows, place), axis, Axis("", 0.0, 1.0, percent), label)
        solved.append(Card(label, Markup(svg), SOLVED_COUNTS))
        label = f"Mean reward against {name}"
        points = [Point(place(r.version), r.reward, f"version {r.version}: {r.reward:.3f}") for r in _trained(rows)]
        height = Axis("", low=min([0.0, *(point.y for point in points)]))
        rewards.append(Card(label, Markup(xy([Series("reward", points)], axis, height, label)), REWARD_COUNTS))
    return solved + rewards


SOLVED_COUNTS = (
    "Line: share of graded RL rollouts that passed all hidden tests, booked under the oldest version that sampled any "
    "of their tokens. Points: held-out evaluations, sampled wholly under the version. Bars: 95 % Wilson intervals."
)
REWARD_COUNTS = (
    "Mean total reward of graded RL rollouts, booked under the oldest version that sampled any of their tokens."
)


def _whole(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else ""


def _trained(rows: list[VersionRow]) -> list[VersionRow]:
    return [row for row in rows if row.training.count]


def _before(rows: list[VersionRow], spent: Mapping[int, float]) -> dict[int, float]:
    """By version the sum of what was spent under earlier ones: what it took to get there."""
    return {row.version: sum(v for version, v in spent.items() if version < row.version) for row in rows}


def _solved(rows: list[VersionRow], place: Callable[[int], float]) -> list[Series]:
    def point(version: int, rate: Rate, what: str) -> Point:
        return Point(place(version), rate.rate, f"version {version}, {what}: {_interval(rate)}", rate.low, rate.high)

    training = [point(row.version, row.training, "RL rollouts") for row in _trained(rows)]
    sets = sorted({name for row in rows for name in row.held_out})
    return [
        Series("RL rollouts", training),
        *(
            Series(
                name.replace("_", " "),
                [point(row.version, row.held_out[name], name) for row in rows if name in row.held_out],
                joined=False,
            )
            for name in sets
        ),
    ]


def _conduct(rows: list[VersionRow]) -> list[Card]:
    """How the agent works, by version."""
    axis = Axis("weight version", show=_whole)
    trained = _trained(rows)

    def card(heading: str, value: Callable[[VersionRow], float], counts: str) -> Card:
        points = [Point(float(r.version), value(r), f"version {r.version}: {percent(value(r))}") for r in trained]
        svg = xy([Series(heading, points)], axis, Axis("", 0.0, show=percent), heading)
        return Card(heading, Markup(svg), counts)

    return [
        card(
            "Turns with parallel calls",
            lambda row: row.parallel_turns,
            "Share of turns of graded RL rollouts that asked for more than one tool call.",
        ),
        card(
            "Reads before the first edit",
            lambda row: row.reads_before_edit,
            "Share of graded RL rollouts that edited a file and had read it first, of all that edited one.",
        ),
    ]


# -- the machine -------------------------------------------------------------------------------------------------

BUSY_COUNTS = {
    "sampling": "Requests being prefilled or decoded.",
    "waiting for the engine": "Requests waiting for their first place in the engine's batch.",
    "tool calls": "Tool calls running in sandboxes.",
    "grading": "Gradings running.",
    "training": "1 while a step computes and its checkpoint is uploaded.",
}


def _busy(fold: RunFold, book: SessionBook) -> list[Card]:
    """What was under way at the same time, over the run."""
    used = utilisation(fold, book)
    cards = []
    for name, values in used.curves.items():
        points = [((index + 0.5) * used.bin_s / 60, value) for index, value in enumerate(values)]
        svg = area(points, Axis("minutes since the first event", low=0.0), Axis("", 0.0), f"{name} over time")
        counts = f"{BUSY_COUNTS[name]} Mean number at the same time in each {used.bin_s:g} s, from events' durations."
        cards.append(Card(name.capitalize(), Markup(svg), counts))
    return cards


def _selection(fold: RunFold) -> list[Card]:
    """What was trained on and what was not: staleness and lengths."""
    total = sum(fold.staleness.values())
    behind = [
        (str(versions), count / total, f"{count} of {total} members, {versions} versions behind")
        for versions, count in sorted(fold.staleness.items())
    ]
    members = [m for batch in fold.batches.values() for m in batch.members]
    trained = [float(fold.verdicts[m.session_id].sampled_tokens) for m in members if m.session_id in fold.verdicts]
    lost = [float(length) for lengths in fold.lost_lengths.values() for length in lengths]
    bound = ", ".join(f"{lane.max_staleness} in lane {name}" for name, lane in sorted(fold.lanes.items()))
    return [
        Card(
            "Staleness of what was trained",
            Markup(columns(behind, "versions behind", Axis("", 0.0, show=percent), "Staleness")),
            f"Members of batches by versions between their oldest token and the version that was trained; "
            f"bound: {bound or 'not configured'}. {fold.masked_tokens:,} tokens beyond it were masked.",
        ),
        Card(
            "Length of what was not trained on",
            Markup(histogram([("trained", trained), ("left out", lost)], Axis("sampled tokens", 0.0), LENGTH_BINS,
                             "Length distributions")),
            "Sampled tokens of a rollout: share of rollouts in batches against share of finished rollouts whose group "
            "was discarded or left out. If the two differ, what is dropped biases what is learned.",
        ),
    ]  # fmt: skip


# -- tables ------------------------------------------------------------------------------------------------------


def _events(fold: RunFold, book: SessionBook) -> list[tuple[str, int, float]]:
    counts = fold.events + book.events
    top = max(counts.values(), default=1)
    return [(name, count, count / top) for name, count in sorted(counts.items())]


def _groups(fold: RunFold) -> list[tuple[str, int, str]]:
    kept = sum(len(batch.groups) for batch in fold.batches.values())
    waiting = sum(fold.unbatched(lane) for lane in fold.lanes)
    evaluations = sum(1 for group in fold.groups.values() if group.purpose == "eval")
    return [
        ("opened", len(fold.groups), f"{evaluations} of them evaluations"),
        ("open at the end", len(fold.open_groups), ""),
        ("sealed", fold.sealed, "evaluations included"),
        ("trained on", kept, "kept by assembly, in a batch"),
        *((f"left out: {why}", n, f"sealed; {_lengths(fold, why)}") for why, n in sorted(fold.dropped.items())),
        *(
            (f"discarded: {why}", n, f"never sealed; {_lengths(fold, why)}")
            for why, n in sorted(fold.discarded.items())
        ),
        ("sealed, in no batch yet", waiting, "RL groups after the last batch"),
        *((f"ungraded sessions: {cause}", count, "kept out of every mean") for cause, count in fold.ungraded.items()),
    ]


def _lengths(fold: RunFold, reason: str) -> str:
    """The length distribution of what was dropped for a reason."""
    lengths = sorted(fold.lost_lengths.get(reason, []))
    if not lengths:
        return "no member had finished"
    middle = lengths[len(lengths) // 2]
    return f"sampled tokens of {len(lengths)} finished members: {lengths[0]} to {lengths[-1]}, median {middle}"


def _batches(fold: RunFold) -> list[dict[str, str]]:
    steps = {step.batch_id: step for step in fold.steps}
    table = []
    for batch in list(fold.batches.values())[-BATCHES_SHOWN:]:
        step = steps.get(batch.batch_id)
        metrics = step.metrics if step is not None else {}
        table.append(
            {
                "ordinal": str(batch.ordinal),
                "groups": f"{len(batch.groups)} + {len(batch.dropped)}",
                "members": str(len(batch.members)),
                "tokens": f"{sum(m.trained_tokens for m in batch.members):,}",
                "seconds": f"{step.seconds:.1f}" if step is not None else "not trained",
                "entropy": _metric(metrics, "entropy"),
                "gradient norm": _metric(metrics, "gradient_norm"),
                "clipped": _metric(metrics, "clip_fraction"),
                "sampler gap": _metric(metrics, "gap_mean"),
                "root": batch.merkle_root[:12],
            }
        )
    return table


def _metric(metrics: Mapping[str, float], name: str) -> str:
    return f"{metrics[name]:.3g}" if name in metrics else ""


def _suspects(fold: RunFold, book: SessionBook) -> list[str]:
    found = fold.suspects() + [s for _, clock in sorted(book.clocks.items()) for s in clock.suspects()]
    return [f"{s.ref}: stamped {_when(s.stamp_ms)}, {s.flag}; placed at {_when(s.placed_ms)}" for s in found]


def _clocks(fold: RunFold, book: SessionBook) -> list[str]:
    return _suspects(fold, book)[:SUSPECTS_SHOWN]
