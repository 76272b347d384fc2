"""`odradek status`: how every service and the actors stand. Exit code 3 if one of them is not running."""

from __future__ import annotations

from collections.abc import Sequence

import click

from odradek.infra.cli.context import EXIT_ENVIRONMENT, Context, command_options
from odradek.infra.config.tree import Config
from odradek.infra.errors import InfraError
from odradek.infra.observe.actors import ActorView
from odradek.infra.stack.stack import ComponentStatus, Health
from odradek.infra.telemetry import TELEMETRY


@click.command
@command_options
def command(context: Context) -> None:
    """How every service stands, asked of the service itself, and whether the actors answer.

    Actors that nobody started (`odradek up --no-actors`) are not listed and are no fault.
    """
    from odradek.infra.config.services import stack_of

    context.say("asking the services …")
    statuses = stack_of(context.config).status()
    if all(status.health == "running" for status in statuses):
        context.say("asking the actors …")
        statuses = (*statuses, *_actors(context.config))
    context.result(statuses, table(statuses))
    if any(status.health != "running" for status in statuses):
        raise click.exceptions.Exit(EXIT_ENVIRONMENT)


def _actors(config: Config) -> list[ComponentStatus]:
    """One row for all actors and one for the metrics page; none if none was started."""
    from odradek.infra.cluster import standing

    embedded = config.ray.address is None
    try:
        views = standing.look(config)
    except InfraError as error:
        return [ComponentStatus("actors", "unhealthy", "", embedded, reason=str(error))]
    return actor_rows(views, embedded) if views else []


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
