"""`odradek status`: how every service and the actors stand, and what waits longest. Exit code 3 unless all of them are
seen to run: also while an `up` is starting them, and if one was silent for as long as it was waited for, which on a
busy host need be no fault. A wait, however long, is no reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_ENVIRONMENT, Context, command_options
from odradek.infra.config.tree import Config
from odradek.infra.errors import InfraError
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.pending import Pending
from odradek.infra.stack.stack import ComponentStatus, Health, shortage
from odradek.infra.stack.state import ACTORS_LOCK, under_way
from odradek.infra.telemetry import TELEMETRY

SHOWN = 5
"""Waits on the screen, and as many more that are late. More would hide how the services stand."""


@click.command
@command_options
def command(context: Context) -> None:
    """How every service stands, asked of the service itself, whether the actors answer, and what waits longest.

    Actors that nobody started (`odradek up --no-actors`) are not listed and are no fault. A wait is shown with its
    owner, who gives up at the deadline; --json has the fifty oldest. Exit code 3 unless all are running: stopped,
    unhealthy, starting (odradek up is under way), or silent (no answer in time, which on a busy host need be no fault).
    """
    from odradek.infra.config.services import stack_of

    context.say("asking the services …")
    stack = stack_of(context.config)
    statuses = stack.status()
    views: list[ActorView] = []
    if under_way(stack.data, ACTORS_LOCK):
        statuses = (*statuses, ComponentStatus("actors", "starting", "", context.config.ray.address is None))
    elif all(status.health == "running" for status in statuses):
        context.say("asking the actors …")
        views, rows = _actors(context.config)
        statuses = (*statuses, *rows)
    waiting = waits(views)
    statuses = (*statuses, *disk_rows(stack.data))
    context.result({"services": statuses, "waiting": waiting}, "\n".join([table(statuses), *wait_lines(waiting)]))
    if any(status.health != "running" for status in statuses):
        raise click.exceptions.Exit(EXIT_ENVIRONMENT)


def disk_rows(data: Path) -> list[ComponentStatus]:
    """One row if the disk is short: work stands still then, and nothing else says why."""
    with suppress(OSError):  # there is no folder yet
        if short := shortage(data):
            reason = f"{short}: no sandbox is made until there is room"
            return [ComponentStatus("disk", "unhealthy", "", embedded=True, reason=reason)]
    return []


def _actors(config: Config) -> tuple[list[ActorView], list[ComponentStatus]]:
    """What they say; and one row for all of them and one for the metrics page, none if none was started."""
    from odradek.infra.cluster import standing

    embedded = config.ray.address is None
    try:
        views = standing.look(config)
    except InfraError as error:
        return [], [ComponentStatus("actors", "unhealthy", "", embedded, reason=str(error))]
    return views, actor_rows(views, embedded) if views else []


def waits(views: Sequence[ActorView]) -> list[Pending]:
    """What waits, as the actor that follows the log says; the oldest first."""
    said: list[Any] = next((view.state.get("waits", []) for view in views if view.name == TELEMETRY and view.up), [])
    return msgspec.convert(said, list[Pending])


def wait_lines(waiting: Sequence[Pending]) -> list[str]:
    """The oldest waits, and all that are past their deadline as long as there are few."""
    late = [one for one in waiting if one.late]
    shown = sorted({*waiting[:SHOWN], *late[:SHOWN]}, key=lambda one: -one.age_s)
    lines = ["  waiting longest:"] if shown else []
    for one in shown:
        until = f"gives up at {one.deadline_s:.0f} s" if one.deadline_s is not None else "nothing is owed"
        mark = "  LATE" if one.late else ""
        lines.append(f"  {one.age_s:7.0f} s  {one.wait}: {one.who} ({one.what}); {one.owner} {until}{mark}")
    return lines


def actor_rows(views: Sequence[ActorView], embedded: bool) -> list[ComponentStatus]:
    """From what the actors say. One that answers and has stopped for good (its `fault`), or can't load the weights that
    it is to serve (`refused`), is as unhealthy as one that is not there; of one that is silent nothing is known."""
    silent = [view for view in views if view.unanswered_s]
    down = [f"{view.name} ({view.note})" for view in views if not view.up and view not in silent]
    up = f"{sum(view.up for view in views)} of {len(views)} answer"
    faults = [f"not {', '.join(down)}"] if down else []
    for problem in ("fault", "refused"):
        faults += [f"{view.name} {view.state[problem]}" for view in views if view.up and view.state.get(problem)]
    health: Health = "unhealthy" if faults else "silent" if silent else "running"
    said = [*faults, _silence(silent)] if silent else faults
    page = next((str(view.state["address"]) for view in views if view.name == TELEMETRY and view.up), "")
    serves: Health = "running" if page else "silent" if TELEMETRY in [view.name for view in silent] else "stopped"
    actors = ComponentStatus("actors", health, up, embedded, reason="; ".join(said))
    return [actors, ComponentStatus("metrics", serves, page, embedded)]


def _silence(silent: Sequence[ActorView]) -> str:
    """What is known of actors that have not answered, and what may excuse them."""
    names, within = ", ".join(view.name for view in silent), max(view.unanswered_s for view in silent)
    host = f"host load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    return f"no answer within {within:.0f} s from {names} ({host}); nothing says that they are down: ask again"


def table(statuses: Sequence[ComponentStatus]) -> str:
    """One line a service."""
    lines = []
    for status in statuses:
        where = "embedded" if status.embedded else "configured"
        lines.append(f"  {status.name:<7} {status.health:<10} {where:<11} {status.address}".rstrip())
        if status.reason:
            lines.append(f"          {status.reason}" + (f"; log: {status.log}" if status.log else ""))
    return "\n".join(lines)
