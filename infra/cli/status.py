"""`odradek status`: how every service stands. Exit code 3 if one of them is not running."""

from __future__ import annotations

from collections.abc import Sequence

import click

from odradek.infra.cli.context import EXIT_ENVIRONMENT, Context, command_options
from odradek.infra.stack.stack import ComponentStatus


@click.command
@command_options
def command(context: Context) -> None:
    """How every service stands, asked of the service itself."""
    from odradek.infra.config.services import stack_of

    statuses = stack_of(context.config).status()
    context.result(statuses, table(statuses))
    if any(status.health != "running" for status in statuses):
        raise click.exceptions.Exit(EXIT_ENVIRONMENT)


def table(statuses: Sequence[ComponentStatus]) -> str:
    """One line a service."""
    lines = []
    for status in statuses:
        where = "embedded" if status.embedded else "configured"
        lines.append(f"  {status.name:<6} {status.health:<10} {where:<11} {status.address}".rstrip())
        if status.reason:
            lines.append(f"         {status.reason}" + (f"; log: {status.log}" if status.log else ""))
    return "\n".join(lines)
