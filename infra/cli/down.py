"""`odradek down`: end the actors and every embedded process of the data folder. Data stays; nothing else is touched."""

from __future__ import annotations

import click

from odradek.infra.cli.context import Context, command_options
from odradek.infra.errors import Unreachable


@click.command
@command_options
def command(context: Context) -> None:
    """Stop the actors and the embedded services. Data stays."""
    from odradek.infra.config.services import stack_of

    ended: list[str] = []
    if context.config.ray.address is not None:
        ended += _actors_elsewhere(context)
    ended += stack_of(context.config).down(context.progress)  # actors on an embedded Ray end with its processes
    text = f"stopped {', '.join(ended)}" if ended else "nothing was running"
    context.result({"stopped": list(ended)}, text)


def _actors_elsewhere(context: Context) -> list[str]:
    """A configured Ray goes on when ours ends: its actors have to be asked."""
    from odradek.infra.cluster import standing

    try:
        return standing.stop(context.config)
    except Unreachable as error:
        context.say(f"actors could not be looked for: {error}")
        return []
