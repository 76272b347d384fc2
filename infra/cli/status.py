"""`odradek status`: how every service and the actors stand, and what waits longest. Exit code 3 if one of them is not
running; a wait, however long, is no reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_ENVIRONMENT, Context, command_options
from odradek.infra.config.tree import Config
from odradek.infra.errors import InfraError
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.pending import Pending
from odradek.infra.stack.stack import ComponentStatus, Health
from odradek.infra.telemetry import TELEMETRY

SHOWN = 5
"""Waits on the screen, and as many more that are late. More would hide how the services stand."""


@click.command
@command_options
def command(context: Context) -> None:
    """How every service stands, asked of the service itself, whether the actors answer, and what waits longest.

    Actors that nobody started (`odradek up --no-actors`) are not listed and are no fault. A wait is shown with its
    owner, who gives up at the deadline; --json has the fifty oldest.
    """
    from odradek.infra.config.services import stack_of

    context.say("asking the services …")
    statuses = stack_of(context.config).status()
    views: list[ActorView] = []
    if all(status.health == "running" for status in statuses):
        context.say("asking the actors …")
        views, rows = _actors(context.config)
        statuses = (*statuses, *rows)
    waiting = waits(views)
    context.result({"services": statuses, "waiting": waiting}, "\n".join([table(statuses), *wait_lines(waiting)]))
    if any(status.health != "running" for status in statuses):
        raise click.exceptions.Exit(EXIT_ENVIRONMENT)


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
    """From what the actors say. One that answers and has stopped for good (its `fault`) is as unhealthy as a silent
    one."""
    silent = [f"{view.name} ({view.note})" for view in views if not view.up]
    up = f"{len(views) - len(silent)} of {len(views)} answer"
    faults = [f"not {', '.join(silent)}"] if silent else []
    faults += [f"{view.name} {view.state['fault']}" for view in views if view.up and view.state.get("fault")]
    health: Health = "unhealthy" if faults else "running"
    rows = [ComponentStatus("actors", health, up, embedded, reason="; ".join(faults))]
    page = next((str(view.state["address"]) for view in views if view.name == TELEMETRY and view.up), "")
    return [*rows, ComponentStatus("metrics", "running" if page else "stopped", page, embedded)]


def table(statuses: Sequence[ComponentStatus]) -> str:
    """One line a service."""
    lines = []
    for status in statuses:
        where = "embedded" if status.embedded else "configured"
        lines.append(f"  {status.name:<7} {status.health:<10} {where:<11} {status.address}".rstrip())
        if status.reason:
            lines.append(f"          {status.reason}" + (f"; log: {status.log}" if status.log else ""))
    return "\n".join(lines)
