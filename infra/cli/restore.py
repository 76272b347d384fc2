"""`odradek restore`: go on where log and object store were restored from different moments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_CODES, Context, command_options
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import Unreachable, UsageError

if TYPE_CHECKING:
    from odradek.actors.runtime.deployment import Deployment
    from odradek.actors.trainer.restore import Restored
    from odradek.streams.audit.chains import Rechained
    from odradek.streams.blobs import ObjectStore
    from odradek.streams.log import EventLog
    from odradek.streams.replay.lost import LostObject

NAMED = 5
"""Lost objects that are printed as text; all are in the JSON."""


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found and done."""

    lanes: list[Restored]
    lost: list[LostObject]
    """Objects that the log names and the store has not. Nothing can make them again."""
    audit: Rechained | None
    """None: this deployment runs no notary, or it has signed nothing yet."""

    @property
    def whole(self) -> bool:
        """Whether every lane can go on, and the notary."""
        stuck = self.audit is not None and self.audit.why and not self.audit.signed
        return not stuck and not any(lane.stops_at for lane in self.lanes)


@click.command(epilog=EXIT_CODES)
@click.option("--lane", "lanes", multiple=True, help="Only this lane; repeatable [every lane that has a version].")
@click.option("--reason", default="", help="Kept with the decision.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and given up; change nothing.")
@command_options
def command(context: Context, lanes: tuple[str, ...], reason: str, dry_run: bool) -> None:
    """Begin a new incarnation at the newest version complete in both Kafka and the object store.

    For when the two were restored from different moments: then the trainer stops rather than adopt another history's
    checkpoint, and the notary rather than build on a log that lacks what it signed. Says what is given up (nothing is
    deleted), which batches are trained again and which objects of sessions are lost; begins a new audit chain where
    the old one can't go on. What fits is left alone. Exit code 1 if something is left that stops a lane or the notary.
    The services must run and the actors must not: odradek down, then odradek up --no-actors.
    """
    context.say("looking whether the actors run …")
    _no_actors(context)
    found = run(context, "comparing log and store", lambda tell: _restored(context, lanes, reason, dry_run, tell))
    context.result(found, as_text(found, dry_run))
    if not found.whole:
        raise click.exceptions.Exit(EXIT_CASE_FAILED)


async def _restored(context: Context, lanes: tuple[str, ...], reason: str, dry_run: bool, tell: Say) -> Restoration:
    from odradek.actors.runtime.store import object_store
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import endpoints
    from odradek.streams.replay.lost import lost_objects

    deployment = deployment_of(context.config, endpoints(context.config, ray=False))
    store = object_store(deployment)
    async with opened_log(context) as event_log:
        lost = await lost_objects(event_log, store, tell)
        tell("each lane's versions")
        done = await _lanes(event_log, store, deployment, lanes, lost, reason, dry_run, tell)
        audit = await _audit(event_log, deployment, reason, dry_run) if deployment.audit.enabled else None
    return Restoration(lanes=done, lost=lost, audit=audit)


async def _lanes(
    event_log: EventLog,
    store: ObjectStore,
    deployment: Deployment,
    lanes: tuple[str, ...],
    lost: list[LostObject],
    reason: str,
    dry_run: bool,
    tell: Say,
) -> list[Restored]:
    from odradek.actors.trainer.restore import Incarnation, histories, restore

    unreadable = {one.record_key: one.key for one in reversed(lost) if one.what == "record"}
    known = await histories(event_log)
    missing = set(lanes) - {one.lane for one in known}
    if missing:
        there = ", ".join(one.lane for one in known) or "none"
        raise UsageError(f"no lane {', '.join(sorted(missing))} with a version; there are: {there}")
    incarnation = await Incarnation.unused(event_log, store, deployment.incarnation)
    warm_start, done = Path(deployment.warm_start_dir), []
    for one in known:
        if not lanes or one.lane in lanes:
            tell(f"lane {one.lane}")
            found = await restore(
                event_log, store, one, incarnation, warm_start, reason=reason, dry_run=dry_run, lost=unreadable
            )
            done.append(found)
    return done


async def _audit(event_log: EventLog, deployment: Deployment, reason: str, dry_run: bool) -> Rechained | None:
    from odradek.actors.notary.access import own_key, vault_of
    from odradek.streams.audit.chains import rechain

    settings = deployment.audit
    vault = vault_of(deployment.store, settings)
    if not await vault.open():
        return None
    return await rechain(event_log, vault, settings.name, own_key(settings), reason=reason, dry_run=dry_run)


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


def as_text(found: Restoration, dry_run: bool) -> str:
    """A block a lane, what is lost, and the audit."""
    lines = [_lane(one, dry_run) for one in found.lanes] or ["no lane has a version yet"]
    if found.lost:
        lines.append(f"lost: {len(found.lost)} objects that the log names; nothing can make them again")
    for one in found.lost[:NAMED]:
        follows = "its session can't be read" if one.what == "record" else "no workspace can be made of it"
        lines.append(f"  {one.key}: {follows} ({one.at}, {one.record_key})")
    if len(found.lost) > NAMED:
        lines.append(f"  … and {len(found.lost) - NAMED} more (--json)")
    return "\n".join([*lines, *_chain(found.audit, dry_run)])


def _chain(audit: Rechained | None, dry_run: bool) -> list[str]:
    if audit is None or not audit.why:
        return []
    if not audit.signed:
        name = audit.chain.replace("/", "-")
        return [
            f"audit: {audit.why}, and this host has not the notary's key, so the notary will stop: run this where "
            f"audit.key_file is, or begin a chain by another name: --set audit.name={name}"
        ]
    gone = f"; {audit.rounds_lost} signed rounds are given up, and stay in the bucket" if audit.rounds_lost else ""
    did = "would begin" if dry_run else "began"
    return [f"audit: {did} chain {audit.chain} after {audit.before}: {audit.why}{gone}"]


def _lane(one: Restored, dry_run: bool) -> str:
    head = f"lane {one.lane} ({one.policy}): "
    if not one.begun:
        fit = f"{head}log and store fit at version {one.version} ({one.manifest_key}); nothing to do"
        return "\n".join([fit, *_stop(one)])
    source = one.restored_from or "the warm start"
    lines = [
        f"{head}{'would begin' if dry_run else 'began'} incarnation {one.incarnation} at version {one.version}, from "
        f"{source}"
    ]
    lines += [f"  given up, not whole in the store: {why}" for why in one.log_only]
    lines += [f"  given up, unknown to the log: {key}" for key in one.store_only]
    lines += [f"  trained again: batch {batch}" for batch in one.train_again]
    return "\n".join([*lines, *_stop(one)])


def _stop(one: Restored) -> list[str]:
    if not one.stops_at:
        return []
    return [
        f"  STOPS at {one.stops_at}, which the store lost: put the object back, or branch off before it: "
        f"odradek train --from {one.version} --policy ID"
    ]
