"""`odradek demo`: the main job, end to end, on this machine."""

from __future__ import annotations

import asyncio

import click

from odradek.infra.cli.context import CaseFailed, Context, command_options


@click.command
@command_options
@click.option("--keep", is_flag=True, help="Leave the services and actors running at the end.")
def command(context: Context, keep: bool) -> None:
    """Start everything, evaluate, train on rollouts, evaluate again, rebuild every batch, stop everything.

    Tasks are published to Kafka; groups of rollouts work in real sandboxes; hidden tests reward them; batches are
    assembled exactly once; checkpoints go to S3 and inference actors reload them. Ends by itself.
    """
    from odradek.infra.cluster.session import deployment_up
    from odradek.infra.demo.run import Demo, DemoSettings
    from odradek.infra.demo.summary import as_json, as_text
    from odradek.streams.log import EventLog

    section = context.config.demo
    settings = DemoSettings(
        seed=section.seed,
        train_seconds=section.minutes * 60,
        attempts=context.config.lane.attempts,
        new_combinations=section.new_combinations,
        unseen_identifiers=section.unseen_identifiers,
        unseen_templates=section.unseen_templates,
        greedy=section.greedy,
    )
    with deployment_up(context.config, context.say, keep=keep) as running:

        async def job() -> None:
            async with EventLog(running.deployment.kafka) as event_log:
                demo = Demo(running.deployment, settings, event_log, running.states, context.say)
                outcome = await demo.run()
                context.result(await as_json(outcome, event_log), await as_text(outcome, event_log))
                if outcome.rebuild is None or outcome.rebuild.identical != len(outcome.rebuild.batches):
                    raise CaseFailed(f"batches rebuilt: {outcome.rebuild}")

        asyncio.run(job())
