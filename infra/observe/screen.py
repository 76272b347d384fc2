"""A `Frame` as a terminal screen. Pure: a frame and a width in, lines out; colour only underlines what words say."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from odradek.actors.tools.text import show_name
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.frame import Frame, Rate, VersionRow

VERSIONS_SHOWN = 12
"""Newest weight versions on the screen, beside those that were evaluated. More scrolls the rest away."""
LONG_WAIT_S = 30.0
"""Seconds from which a wait is shown as remarkable."""
BAR = 16
"""Characters of a full solve-rate bar."""


def screen(frame: Frame, *, actors_absent: str = "") -> RenderableType:
    """The whole picture. `actors_absent` says why no actor was asked."""
    return Group(
        _headline(frame),
        _versions(frame),
        _two_columns(_loop(frame), _actors(frame.actors, actors_absent)),
        _wait(frame),
    )


def as_text(frame: Frame, *, actors_absent: str = "", width: int = 110) -> str:
    """One frame for a pipe or a file."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as capture:
        console.print(screen(frame, actors_absent=actors_absent))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _headline(frame: Frame) -> Text:
    flying = ", ".join(f"{count} {origin}" for origin, count in frame.in_flight.items() if count) or "none"
    version = "none yet" if frame.version is None else str(frame.version)
    text = Text()
    text.append(f"odradek {time.strftime('%H:%M:%S', time.localtime(frame.time_ms / 1000))}", style="bold")
    text.append(f"   weights: version {version}   sessions in flight: {flying}\n")
    text.append(
        f"last {frame.window_s:.0f} s: {frame.tool_calls_per_s:.1f} tool calls/s, {frame.turns_per_s:.1f} turns/s, "
        f"{frame.sampled_tokens_per_s:.0f} sampled tokens/s"
    )
    return text


def _versions(frame: Frame) -> RenderableType:
    table = Table(title="By weight version", title_justify="left", title_style="bold", pad_edge=False, box=None)
    for name in ("version", "rollouts", "solved", "", "reward", "reads first", "parallel"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    shown = frame.versions[-VERSIONS_SHOWN:]
    for row in shown:
        table.add_row(*_version_cells(row))
    if not shown:
        return Text("no version has been published or has sampled yet", style="dim")
    if len(shown) < len(frame.versions):
        table.caption = f"{len(frame.versions) - len(shown)} older versions not shown"
    return Group(table, _held_out(frame))


def _held_out(frame: Frame) -> RenderableType:
    """Evaluations: rate and 95 % interval of each set, a row a version."""
    evaluated = [row for row in frame.versions if row.held_out]
    if not evaluated:
        return Text("held out: not evaluated yet", style="dim")
    sets = sorted({name for row in evaluated for name in row.held_out})
    table = Table(title="Held out, solved", title_justify="left", title_style="bold", pad_edge=False, box=None)
    table.add_column("version", justify="right")
    for name in sets:
        table.add_column(show_name(name.replace("_", " ")), justify="right")
    for row in evaluated:
        table.add_row(str(row.version), *(_rate(row.held_out.get(name)) for name in sets))
    return table


def _version_cells(row: VersionRow) -> list[str]:
    if not row.training.count:
        return [str(row.version), "0", "-", "", "-", "-", "-"]
    rate = row.training.rate
    return [
        str(row.version),
        str(row.training.count),
        f"{100 * rate:.0f} %",
        "█" * round(BAR * rate),
        f"{row.reward:.2f}",
        f"{100 * row.reads_before_edit:.0f} %",
        f"{100 * row.parallel_turns:.0f} %",
    ]


def _rate(rate: Rate | None) -> str:
    """As `41 % (34-48, n=120)`: the rate, its 95 % interval and its trials."""
    if rate is None or not rate.count:
        return ""
    return f"{100 * rate.rate:.0f} % ({100 * rate.low:.0f}-{100 * rate.high:.0f}, n={rate.count})"


def _loop(frame: Frame) -> RenderableType:
    """What waits between the stages."""
    table = Table(title="Groups, batches, lag", title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    if frame.waiting_tasks is not None:
        table.add_row(str(frame.waiting_tasks), "tasks waiting to be opened")
    table.add_row(str(frame.open_groups), "groups open")
    table.add_row(str(frame.sealed_groups), "groups sealed")
    for reason, count in sorted(frame.discarded.items()):
        table.add_row(str(count), f"groups discarded: {reason}")
    for reason, count in sorted(frame.left_out.items()):
        table.add_row(str(count), f"groups left out of batches: {reason}")
    table.add_row(str(frame.batches), f"batches assembled, {frame.steps} trained")
    behind = [lag for lag in frame.lags if lag.count]
    for lag in behind:
        table.add_row(Text(str(lag.count), style="yellow"), f"{show_name(lag.consumer)}: {lag.what}")
    if not behind:
        table.add_row("0", f"lag of {', '.join(show_name(lag.consumer) for lag in frame.lags)}")
    if frame.staleness:
        total = sum(frame.staleness.values())
        parts = ", ".join(f"{k}: {100 * count / total:.0f} %" for k, count in frame.staleness.items())
        table.add_row("", f"versions behind when trained: {parts}")
    if frame.suspect_stamps:
        table.add_row(Text(str(frame.suspect_stamps), style="yellow"), "records with a clock that is not believed")
    return table


def _actors(views: Iterable[ActorView], absent: str) -> RenderableType:
    table = Table(title="Actors", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("actor")
    table.add_column("work/s", justify="right")
    table.add_column("says", overflow="fold")
    for view in views:
        if view.asked:
            table.add_row(view.name, "", Text(f"asked; {view.note} so far", style="yellow"))
        elif not view.up:
            table.add_row(view.name, "", Text(f"down: {show_name(view.note)}" if view.note else "down", style="red"))
        else:
            rate = "" if view.work_rate is None else f"{view.work_rate:.2f}"
            said = _says(view)
            table.add_row(view.name, rate, f"{said} ({show_name(view.note)})" if view.note else said)
    if absent:
        return Group(table, Text(absent, style="dim")) if table.row_count else Text(absent, style="dim")
    return table


SAID = ("version", "running", "waiting", "active", "live", "graded", "open_groups", "waiting_tasks", "position")
"""Parts of an actor's state that fit a line, in this order; `--json` has all."""


def _says(view: ActorView) -> str:
    parts = []
    for name in SAID:
        value = view.state.get(name)
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            parts.append(f"{name.replace('_', ' ')} {value:g}")
    return ", ".join(parts)


def _wait(frame: Frame) -> Text:
    wait = frame.oldest_wait
    if wait is None:
        return Text("")
    style = "yellow" if wait.seconds >= LONG_WAIT_S else ""
    return Text(f"oldest wait: {wait.seconds:.0f} s for {show_name(wait.what)} ({wait.host})", style=style)


def _two_columns(left: RenderableType, right: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(1, 4, 0, 0), expand=False)
    grid.add_column()
    grid.add_column()
    grid.add_row(left, right)
    return grid
