"""`odradek up`: start the embedded services and say where they are. A second one says what is running."""

from __future__ import annotations

import click

from odradek.infra.cli.context import Context, command_options
from odradek.infra.cli.status import table


@click.command
@command_options
def command(context: Context) -> None:
    """Start what the configuration does not find elsewhere: Kafka, S3, Ray.

    An address in the configuration (kafka.bootstrap, s3.endpoint, ray.address) is checked instead. If anything fails,
    everything that this command started is stopped again.
    """
    from odradek.infra.config.services import stack_of

    stack = stack_of(context.config)
    result = stack.up(context.progress)
    embedded = [status for status in result.components if status.embedded]
    head = "already running" if embedded and not result.started else "ready"
    context.result(result, f"{head} (data in {stack.data})\n{table(result.components)}")
