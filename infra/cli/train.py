"""`odradek train`: the loop on generated tasks without the demo's evaluations, and branches of any earlier moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, CaseFailed, Context, Number, command_options
from odradek.infra.cli.guard import guarded
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.infra.cluster.branch import Branch
    from odradek.infra.config.tree import Config
    from odradek.infra.observe.fold import RunFold
    from odradek.streams.replay.rebuild import RebuildReport


@click.command(epilog=EXIT_CODES)
@click.option("--minutes", type=Number(0, min_open=True), help="Length of the window [demo.minutes].")
@click.option(
    "--from", "start", metavar="VERSION|PLACE",
    help="Branch off this version of lane.policy, or the one in force at TOPIC/PARTITION@OFFSET.",
)  # fmt: skip
@click.option("--policy", metavar="ID", help="The branch's policy: a new id, or one to go on with.")
@click.option("--lane", metavar="NAME-2|NAME-3", help="The branch's lane [POLICY-2].")
@click.option("--keep", is_flag=True, help="Leave the services and actors running at the end.")
@command_options
@guarded
def command(
    context: Context, minutes: float | None, start: str | None, policy: str | None, lane: str | None, keep: bool
) -> None:
    """Train on fresh generated tasks for a while, then rebuild every batch of the lane from the log.

    With --from and --policy: branch a run off any earlier version or offset, under whatever objective is --set
    (lane.advantage, lane.anchor, trainer.surrogate, …). The branch has a policy and a lane of its own and begins with
    the parent's weights and optimiser; the parent's history is only read. The same --policy without --from goes on with
    it. A standing deployment (odradek up) trains the main line on any client's tasks and needs no such command; it has
    to be down while a branch trains. --set demo.steps=N ends the window after so many new versions.
    """
    if (start or lane) and not policy:
        raise UsageError("--from and --lane go with --policy ID: a branch is a policy of its own")
    config, branch = _branched(context.config, start, policy, lane)
    fold, rebuild, before = _train(context, config, branch, minutes, keep)
    steps = [step for step in fold.steps if step.lane == config.lane.name]
    versions = [step.step for step in steps[before:]]
    value = {
        "policy": config.lane.policy,
        "lane": config.lane.name,
        "versions": versions,
        "batches": len(rebuild.batches),
        "identical": rebuild.identical,
    }
    made = f"versions {versions[0]} to {versions[-1]}" if versions else "no new version"
    context.result(value, f"policy {config.lane.policy}, lane {config.lane.name}: {made}; batches rebuilt: {rebuild}")
    if rebuild.identical != len(rebuild.batches):
        raise CaseFailed(f"batches rebuilt: {rebuild}")


def _branched(config: Config, start: str | None, policy: str | None, lane: str | None) -> tuple[Config, Branch | None]:
    """The configuration of the lane that is trained."""
    if policy is None:
        return config, None
    from odradek.infra.cluster.branch import Branch

    names = {"policy": policy, "name": lane or f"{policy}-2"}
    try:
        changed = msgspec.convert({**msgspec.to_builtins(config.lane), **names}, type(config.lane))
    except msgspec.ValidationError as error:
        raise UsageError(f"--policy {policy}, --lane {names['name']}: {error}") from None
    branch = Branch(config.lane.policy, start) if start is not None else None
    return msgspec.structs.replace(config, lane=changed), branch


def _train(
    context: Context, config: Config, branch: Branch | None, minutes: float | None, keep: bool
) -> tuple[RunFold, RebuildReport, int]:
    """What the log says at the end, and how many steps the lane had before."""
    from odradek.actors.runtime.store import log_of
    from odradek.infra.cluster.session import deployment_up
    from odradek.infra.demo.run import Demo, DemoSettings
    from odradek.infra.observe.follow import RunFollower

    settings = DemoSettings(
        seed=config.demo.seed,
        train_seconds=(minutes or config.demo.minutes) * 60,
        train_steps=config.demo.steps,
        attempts=config.lane.attempts,
    )
    with deployment_up(config, context.say, keep=keep, branch=branch) as running:

        async def job() -> Any:
            async with log_of(running.deployment) as event_log:
                lane = running.deployment.lane
                fold = await RunFollower(event_log).refresh()
                before = sum(step.lane == lane.lane for step in fold.steps)
                if lane.parent is None and config.lane.name != "main-0" and not before:
                    raise UsageError(f"lane {lane.lane} is not on the log: --from says where the branch begins")
                return *await Demo(running.deployment, settings, event_log, running.states, context.say).train(), before

        found: tuple[RunFold, RebuildReport, int] = asyncio.run(job())
        return found
