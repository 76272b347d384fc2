"""`odradek replay rescore`: history under another grader and, on request, training on it in a lane of its own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import Context, command_options
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.actors.environment.start import SandboxFactory
    from odradek.actors.reward.rescore import Rescored
    from odradek.actors.runtime.deployment import Deployment
    from odradek.streams.events.batches import BatchAssembled
    from odradek.streams.events.groups import GroupSealed, LaneConfigured, ParentVersion
    from odradek.streams.log import EventLog

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The lane that was trained on the new rewards."""

    lane: str
    policy: str
    parent: str
    """Manifest of the version that it branched off."""
    batches: dict[str, str]
    """By id the Merkle root of each."""
    version: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What was done."""

    grader: str
    lane: str
    sessions: int
    changed: int
    """Sessions whose total is another one than before."""
    appended: int
    """reward.revised events that this run wrote; the others were there."""
    unfit: dict[str, str]
    """By session why the grader can never judge it."""
    trained: Trained | None = None


@click.command
@click.option("--grader", "grader_name", metavar="NAME@VERSION", required=True, help="An unknown one lists them.")
@click.option("--lane", default="main-0", show_default=True, help="Whose sealed groups.")
@click.option("--from", "start", default="", metavar="VERSION|PLACE", help="Only what trained this version on [all].")
@click.option("--reason", default="", help="Kept with every revised reward.")
@click.option("--train", is_flag=True, help="Train on the new rewards, from that version, in a lane of its own.")
@click.option("--into", metavar="NAME-2|NAME-3", help="With --train: the new lane [rescored-2].")
@click.option("--policy", metavar="ID", help="With --train: the new policy [POLICY-GRADER].")
@command_options
def command(
    context: Context,
    grader_name: str,
    lane: str,
    start: str,
    reason: str,
    train: bool,
    into: str | None,
    policy: str | None,
) -> None:
    """Score the finished sessions of a lane again with another grader, and log what it says beside the old verdicts.

    Past batches stay what they were. Run again, it grades only what is new. With --train the recorded groups are sealed
    again under the new rewards, in a lane and for a policy of their own that begins with the version asked for, and
    assembled and trained here and now; two such runs give the same batches. A grader that needs no sandbox needs the
    broker only; --train and the others need the object store too.
    """
    if not train and (into or policy):
        raise UsageError("--into and --policy go with --train")
    for option, value in (("--into", into), ("--policy", policy)):
        if value is not None and not NAME.fullmatch(value):
            raise UsageError(f"{option} {value!r}: expected letters, digits, '.', '_' and '-', at most 128")

    async def work(tell: Say) -> Answer:
        from odradek.actors.reward.errors import UnknownGrader
        from odradek.actors.reward.graders import grader_of
        from odradek.actors.reward.rescore import rescore
        from odradek.streams.replay.reseal import seals_from

        try:
            grader = grader_of(grader_name)
        except UnknownGrader as error:
            raise UsageError(str(error)) from None
        async with opened_log(context) as event_log:
            source = await _source(event_log, lane)
            parent = await _parent(event_log, source.policy, start or "0", needed=train or bool(start))
            names = (into or "rescored-2", policy or f"{source.policy}-{grader.name}")
            lane_config = _new_lane(source, names, parent) if train and parent is not None else None
            seals = await seals_from(event_log, lane, parent.version if parent is not None else 0)
            tell(f"{len(seals)} groups")
            async with _sandboxes(context, grader.sandbox) as factory:
                done = await rescore(
                    event_log, grader, seals, reason, factory=factory,
                    at_once=_deployment(context).max_commands if grader.sandbox else 1, say=tell,
                )  # fmt: skip
            answer = _answer(str(grader), lane, done)
            if lane_config is None:
                return answer
            trained = await _trained(context, event_log, source.lane, lane_config, seals, done, tell)
            return msgspec.structs.replace(answer, trained=trained)

    answer = run(context, "rescoring", work)
    context.result(answer, _text(answer))


def _answer(grader: str, lane: str, done: Rescored) -> Answer:
    return Answer(
        grader=grader,
        lane=lane,
        sessions=len(done.revised),
        changed=done.changed,
        appended=done.appended,
        unfit=done.unfit,
    )


async def _source(event_log: EventLog, lane: str) -> LaneConfigured:
    from odradek.streams.errors import UnknownTopic
    from odradek.streams.replay.reseal import configuration_of

    try:
        found = await configuration_of(event_log, lane)
    except UnknownTopic as error:
        raise UsageError(str(error)) from None
    if found is None:
        raise UsageError(f"no lane {lane!r} was ever configured on this log")
    return found


async def _parent(event_log: EventLog, policy: str, start: str, *, needed: bool) -> ParentVersion | None:
    from odradek.streams.errors import Terminal
    from odradek.streams.replay.branch import branch_point

    if not needed:
        return None
    try:
        return await branch_point(event_log, policy, start)
    except Terminal as error:
        raise UsageError(f"--from: {error}") from None


def _new_lane(source: LaneConfigured, names: tuple[str, str], parent: ParentVersion) -> LaneConfigured:
    """Asked before anything is graded: what is refused has written nothing."""
    from odradek.streams.errors import Terminal
    from odradek.streams.replay.reseal import new_lane

    try:
        return new_lane(source, *names, parent)
    except Terminal as error:
        raise UsageError(str(error)) from None


async def _trained(
    context: Context,
    event_log: EventLog,
    source: str,
    config: LaneConfigured,
    seals: list[tuple[int, GroupSealed]],
    done: Rescored,
    tell: Say,
) -> Trained:
    from odradek.actors.runtime.store import object_store
    from odradek.actors.trainer.checkpoint import Checkpoints
    from odradek.actors.trainer.manifest import Place
    from odradek.actors.trainer.retrain import retrain
    from odradek.streams.errors import Terminal
    from odradek.streams.replay.reseal import reseal

    lane, policy, parent = config.lane, config.policy, config.parent
    assert parent is not None
    try:
        last = await reseal(event_log, config, source, seals, done.revised)
    except Terminal as error:
        raise UsageError(str(error)) from None
    deployment = _deployment(context)
    checkpoints = Checkpoints(object_store(deployment), Place(deployment.incarnation, policy, lane))
    batches: list[BatchAssembled] = await retrain(
        event_log, checkpoints, config, Path(deployment.warm_start_dir), last, tell
    )
    return Trained(
        lane=lane,
        policy=policy,
        parent=parent.manifest_key,
        batches={batch.batch_id: batch.merkle_root for batch in batches},
        version=batches[-1].ordinal + 1 if batches else parent.version,
    )


def _deployment(context: Context) -> Deployment:
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import endpoints

    return deployment_of(context.config, endpoints(context.config, ray=False))


@asynccontextmanager
async def _sandboxes(context: Context, needed: bool) -> AsyncIterator[SandboxFactory | None]:
    """A driver of this process's own, where the grader needs one; its sandboxes end with it."""
    if not needed:
        yield None
        return
    from odradek.actors.environment.start import SandboxFactory, ns_driver
    from odradek.actors.runtime.store import blobs_of
    from odradek.sandbox_images.store import ImageStore

    deployment = _deployment(context)
    images = ImageStore(Path(deployment.data_dir) / "images")
    driver = ns_driver(deployment, "rescore", images)
    await driver.start()
    try:
        yield SandboxFactory(driver, images, blobs_of(deployment))
    finally:
        await driver.close()


def _text(answer: Answer) -> str:
    lines = [
        f"{answer.sessions} sessions of lane {answer.lane} scored by {answer.grader}: {answer.changed} otherwise than "
        f"before; {answer.appended} revised rewards written"
    ]
    lines += [f"  cannot be judged: {session}: {why}" for session, why in answer.unfit.items()]
    if answer.trained is not None:
        one = answer.trained
        lines.append(
            f"lane {one.lane}: {len(one.batches)} batches, policy {one.policy} is at version {one.version}, "
            f"branched off {one.parent}"
        )
    return "\n".join(lines)
