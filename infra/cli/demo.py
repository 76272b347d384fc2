"""`odradek demo`: the main job, end to end, on this machine."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import CaseFailed, Context, command_options
from odradek.infra.cli.figures import GROUPS
from odradek.infra.cli.guard import guarded

if TYPE_CHECKING:
    from odradek.infra.config.tree import Config
    from odradek.infra.demo.run import DemoOutcome


@click.command(epilog=GROUPS)
@command_options
@click.option("--keep", is_flag=True, help="Leave the services and actors running at the end.")
@click.option("--bench", is_flag=True, help="Three seeds, larger sets, greedy as well; prints the mean gain.")
@guarded
def command(context: Context, keep: bool, bench: bool) -> None:
    """Start everything, evaluate, train on rollouts, evaluate again, rebuild every batch, stop everything.

    Tasks are published to Kafka; groups of rollouts work in real sandboxes; hidden tests reward them; batches are
    assembled exactly once; checkpoints go to S3 and inference actors reload them. Ends by itself.

    The same run with a trainer that learns nothing: --set trainer.learning_rate=0
    """
    from odradek.infra.config.services import data_dir
    from odradek.infra.demo import bench as benchmark
    from odradek.infra.demo.summary import as_json, as_text

    config = context.config
    if "projections.enabled" not in context.loaded.origins:
        # Nobody looks at the live tables here, and their worker would take a tenth of the two cores from the rollouts.
        config = msgspec.structs.replace(config, projections=msgspec.structs.replace(config.projections, enabled=False))
    if bench:
        outcomes = {}
        for one in benchmark.configurations(config):
            outcomes[one.demo.seed] = run_once(context, one, keep=False)
            context.say(as_text(outcomes[one.demo.seed]))  # a later seed that fails must not take this one with it
        context.result(benchmark.as_json(outcomes), benchmark.as_text(outcomes))
        return
    outcome = run_once(context, config, keep=keep)
    context.result(as_json(outcome), as_text(outcome))
    if config.kafka.bootstrap is None:
        where = f" --data {shlex.quote(config.data.dir)}" if "data.dir" in context.loaded.origins else ""
        first = "" if keep else f"odradek up{where}, then "
        context.say(f"the log stays in {data_dir(config)}; to read it: {first}odradek report{where}")
    if outcome.rebuild is None or outcome.rebuild.identical != len(outcome.rebuild.batches):
        raise CaseFailed(f"batches rebuilt: {outcome.rebuild}")
    if outcome.audit is not None and outcome.audit.findings:
        raise CaseFailed(f"the log is not as the notary signed it: {outcome.audit.findings[0]}")


def run_once(context: Context, config: Config, *, keep: bool) -> DemoOutcome:
    """One whole run on a deployment that is up for it."""
    from odradek.actors.runtime.store import log_of
    from odradek.infra.cluster.session import deployment_up
    from odradek.infra.demo.run import Demo, DemoSettings

    section = config.demo
    settings = DemoSettings(
        seed=section.seed,
        train_seconds=section.minutes * 60,
        train_steps=section.steps,
        attempts=config.lane.attempts,
        new_combinations=section.new_combinations,
        unseen_identifiers=section.unseen_identifiers,
        unseen_templates=section.unseen_templates,
        greedy=section.greedy,
    )
    with deployment_up(config, context.say, keep=keep) as running:

        async def job() -> DemoOutcome:
            async with log_of(running.deployment) as event_log:
                return await Demo(running.deployment, settings, event_log, running.states, context.say).run()

        return asyncio.run(job())
