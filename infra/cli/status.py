"""`odradek status`: how every service and the actors stand. Exit code 3 if one of them is not running."""

from __future__ import annotations

from collections.abc import Sequence

import click

from odradek.infra.cli.context import EXIT_ENVIRONMENT, Context, command_options
from odradek.infra.config.tree import Config
from odradek.infra.errors import InfraError
from odradek.infra.stack.stack import ComponentStatus


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
    """One row for all actors; none if none was started."""
    from odradek.infra.cluster import standing

    embedded = config.ray.address is None
    try:
        answers = standing.answering(config)
    except InfraError as error:
        return [ComponentStatus("actors", "unhealthy", "", embedded, reason=str(error))]
    if not answers:
        return []
    silent = [name for name, answered in answers.items() if not answered]
    up = f"{len(answers) - len(silent)} of {len(answers)} answer"
    reason = f"no answer from {', '.join(silent)}" if silent else ""
    return [ComponentStatus("actors", "unhealthy" if silent else "running", up, embedded, reason=reason)]


def table(statuses: Sequence[ComponentStatus]) -> str:
    """One line a service."""
    lines = []
    for status in statuses:
        where = "embedded" if status.embedded else "configured"
        lines.append(f"  {status.name:<6} {status.health:<10} {where:<11} {status.address}".rstrip())
        if status.reason:
            lines.append(f"         {status.reason}" + (f"; log: {status.log}" if status.log else ""))
    return "\n".join(lines)
