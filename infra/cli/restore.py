"""`odradek restore`: go on where log and object store were restored from different moments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from odradek.infra.cli.context import EXIT_CODES, Context, command_options
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from odradek.actors.trainer.restore import Restored


@click.command(epilog=EXIT_CODES)
@click.option("--lane", "lanes", multiple=True, help="Only this lane; repeatable [every lane that has a version].")
@click.option("--reason", default="", help="Kept with the decision.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and given up; change nothing.")
@command_options
def command(context: Context, lanes: tuple[str, ...], reason: str, dry_run: bool) -> None:
    """Begin a new incarnation at the newest version complete in both Kafka and the object store.

    For when the two were restored from different moments: then the trainer stops rather than adopt another history's
    checkpoint. Says what is given up (nothing is deleted) and which batches are trained again; a lane whose log and
    store fit is left alone. The services must run and the actors must not: odradek down, then odradek up --no-actors.
    """
    _no_actors(context)
    found = run(context, "comparing log and store", lambda tell: _restored(context, lanes, reason, dry_run, tell))
    context.result(found, "\n".join(_text(one, dry_run) for one in found) or "no lane has a version yet")


async def _restored(context: Context, lanes: tuple[str, ...], reason: str, dry_run: bool, tell: Say) -> list[Restored]:
    from odradek.actors.runtime.store import object_store
    from odradek.actors.trainer.restore import Incarnation, histories, restore
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import endpoints

    deployment = deployment_of(context.config, endpoints(context.config, ray=False))
    store = object_store(deployment)
    warm_start = Path(deployment.warm_start_dir)
    done: list[Restored] = []
    async with opened_log(context) as event_log:
        known = await histories(event_log)
        missing = set(lanes) - {one.lane for one in known}
        if missing:
            there = ", ".join(one.lane for one in known) or "none"
            raise UsageError(f"no lane {', '.join(sorted(missing))} with a version; there are: {there}")
        incarnation = await Incarnation.unused(event_log, store, deployment.incarnation)
        for one in known:
            if not lanes or one.lane in lanes:
                tell(f"lane {one.lane}")
                done.append(
                    await restore(event_log, store, one, incarnation, warm_start, reason=reason, dry_run=dry_run)
                )
    return done


def _no_actors(context: Context) -> None:
    """Raises UsageError while actors run: they hold what the new incarnation gives up."""
    from odradek.infra.config.services import stack_of

    try:
        stack_of(context.config).addresses(("ray",))
    except Unreachable:
        return
    from odradek.infra.cluster import standing

    if standing.look(context.config):
        raise UsageError("the actors run: odradek down, then odradek up --no-actors, then restore")


def _text(one: Restored, dry_run: bool) -> str:
    head = f"lane {one.lane} ({one.policy}): "
    if not one.begun:
        return f"{head}log and store fit at version {one.version} ({one.manifest_key}); nothing to do"
    source = one.restored_from or "the warm start"
    lines = [
        f"{head}{'would begin' if dry_run else 'began'} incarnation {one.incarnation} at version {one.version}, from "
        f"{source}"
    ]
    lines += [f"  given up, not whole in the store: {why}" for why in one.log_only]
    lines += [f"  given up, unknown to the log: {key}" for key in one.store_only]
    lines += [f"  trained again: batch {batch}" for batch in one.train_again]
    return "\n".join(lines)
