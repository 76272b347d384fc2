"""`odradek down`: end every embedded process of the data folder. Data stays; nothing else is touched."""

from __future__ import annotations

import click

from odradek.infra.cli.context import Context, command_options


@click.command
@command_options
def command(context: Context) -> None:
    """Stop the embedded services. Data stays."""
    from odradek.infra.config.services import stack_of

    ended = stack_of(context.config).down(context.progress)
    text = f"stopped {', '.join(ended)}" if ended else "nothing was running"
    context.result({"stopped": list(ended)}, text)
