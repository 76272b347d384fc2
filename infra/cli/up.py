"""`odradek up`: start the embedded services and the actors, and say where they are; again, what is running."""

from __future__ import annotations

import click

from odradek.infra.cli.context import Context, command_options
from odradek.infra.cli.guard import guarded
from odradek.infra.cli.status import table


@click.command
@click.option("--actors/--no-actors", default=True, show_default=True, help="Start the actors too, or services only.")
@command_options
@guarded
def command(context: Context, actors: bool) -> None:
    """Start what the configuration does not find elsewhere (Kafka, S3, Ray), and the actors on it.

    An address in the configuration (kafka.bootstrap, s3.endpoint, ray.address) is checked instead. If anything fails,
    everything that this command started is stopped again.
    """
    from odradek.infra.cluster.policy import checked
    from odradek.infra.config.services import stack_of
    from odradek.infra.stack.state import ACTORS_LOCK, check_not_owned, locked

    if actors:
        checked(context.config)
    stack = stack_of(context.config)
    check_not_owned(stack.data)
    result = stack.up(context.progress)
    started: list[str] = []
    if actors:
        try:
            from odradek.infra.cluster import standing

            with locked(stack.data, name=ACTORS_LOCK):
                started = standing.start(context.config, lambda text: context.progress("actors", text))
        except BaseException:
            if result.started:
                context.progress("stack", "stopping what was started")
                stack.down(context.progress)
            raise
    embedded = [status for status in result.components if status.embedded]
    head = "already running" if (embedded or actors) and not result.started and not started else "ready"
    lines = [f"{head} (data in {stack.data})", table(result.components)]
    if actors:
        lines.append("  actors running" + (f"    started {len(started)}" if started else ""))
    answer = {"started": result.started, "components": result.components, "actors_started": started}
    context.result(answer, "\n".join(lines))
