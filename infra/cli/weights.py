"""`odradek weights`: versions, what is served, where a version came from. Needs only the broker.

Decisions are events on weights.v1; the controller, when it runs, makes them what is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, Context, command_options
from odradek.infra.cli.figures import STEP
from odradek.infra.cli.log import Say, opened_log, run
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.streams.replay.lineage import Lineage, Versions


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `list`."""

    version: int
    parent: int | None
    parent_key: str
    """The manifest that it is a copy of (a branch, a restore); else empty."""
    batch_id: str
    published: str
    """ISO 8601."""
    marks: list[str]
    """current, pinned, rolled back to, pruned."""
    replicas: list[str]
    """That serve it now and are healthy."""
    refused: dict[str, str]
    """By inference actor that is to serve it and can't: why."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """List versions, pin or roll back what is served, explain where a version came from."""


_policy = click.option("--policy", help="[lane.policy of the configuration]")
_reason = click.option("--reason", default="", help="Kept with the decision.")
_version = click.argument("version", type=click.IntRange(0))


@command.command("list")
@_policy
@command_options
def list_(context: Context, policy: str | None) -> None:
    """Every published version, newest last, with what is served."""
    versions = _versions(context, policy)
    rows = [_row(versions, number) for number in sorted(versions.published)]
    context.result(rows, "\n".join(map(_line, rows)) or f"policy {versions.policy} has no version yet")


@command.command
@_version
@_policy
@_reason
@command_options
def rollback(context: Context, version: int, policy: str | None, reason: str) -> None:
    """Serve VERSION until a newer one is published. Training goes on from where it is."""
    from odradek.streams.events.weights import VersionRolledBack

    _decide(context, policy, version, lambda name: VersionRolledBack(policy=name, to_version=version, reason=reason))


@command.command
@_version
@_policy
@_reason
@command_options
def pin(context: Context, version: int, policy: str | None, reason: str) -> None:
    """Serve VERSION whatever is published, until `unpin`."""
    from odradek.streams.events.weights import VersionPinned

    _decide(context, policy, version, lambda name: VersionPinned(policy=name, version=version, reason=reason))


@command.command
@_policy
@_reason
@command_options
def unpin(context: Context, policy: str | None, reason: str) -> None:
    """Serve the newest version again (or the one that was rolled back to)."""
    from odradek.streams.events.weights import VersionPinned

    _decide(context, policy, None, lambda name: VersionPinned(policy=name, version=None, reason=reason))


@command.command(epilog=STEP)
@_version
@_policy
@click.option("--sessions", is_flag=True, help="Name every session.")
@command_options
def explain(context: Context, version: int, policy: str | None, sessions: bool) -> None:
    """Where VERSION came from: its parent, the batch, the sessions in it, their tasks and rewards."""

    async def work(_tell: Say) -> Lineage:
        from odradek.streams.replay.lineage import lineage, versions_of

        async with opened_log(context) as event_log:
            name = policy or context.config.lane.policy
            _must_be_published(await versions_of(event_log, name), version)
            return await lineage(event_log, name, version)

    found = run(context, "reading the log", work)
    context.result(found, _explained(found, sessions))


@command.command
@_version
@click.argument("directory", type=click.Path(path_type=Path))
@_policy
@command_options
def save(context: Context, version: int, directory: Path, policy: str | None) -> None:
    """Write VERSION to a new DIRECTORY that plain transformers opens. Needs broker and object store."""

    async def work(_tell: Say) -> None:
        from odradek.actors.runtime.store import object_store
        from odradek.actors.trainer.export import save_version
        from odradek.infra.cluster.deployment import deployment_of
        from odradek.infra.config.services import endpoints
        from odradek.streams.replay.lineage import versions_of

        deployment = deployment_of(context.config, endpoints(context.config))
        async with opened_log(context) as event_log:
            versions = await versions_of(event_log, policy or context.config.lane.policy)
        _must_be_kept(versions, version)
        store = object_store(deployment)
        await save_version(store, versions.published[version], directory, Path(deployment.tokenizer_file))

    run(context, f"fetching version {version}", work)
    context.result({"version": version, "directory": str(directory)}, f"version {version} is in {directory}")


def _versions(context: Context, policy: str | None) -> Versions:
    async def work(_tell: Say) -> Versions:
        from odradek.streams.replay.lineage import versions_of

        async with opened_log(context) as event_log:
            return await versions_of(event_log, policy or context.config.lane.policy)

    return run(context, "reading versions", work)


def _must_be_published(versions: Versions, version: int) -> None:
    if version not in versions.published:
        known = ", ".join(map(str, sorted(versions.published))) or "none"
        raise UsageError(f"policy {versions.policy} has no version {version}; it has {known}")


def _must_be_kept(versions: Versions, version: int) -> None:
    _must_be_published(versions, version)
    if version in versions.pruned:
        kept = ", ".join(map(str, sorted(versions.published.keys() - versions.pruned)))
        raise UsageError(f"version {version} of policy {versions.policy} was pruned; kept are {kept}")


def _decide(context: Context, policy: str | None, version: int | None, body_of: Callable[[str], Any]) -> None:
    """Append the decision, after a look at whether the version exists."""
    name = policy or context.config.lane.policy

    async def work(_tell: Say) -> Any:
        from odradek.streams import topics
        from odradek.streams.envelope import Event, event_id
        from odradek.streams.events.meta import Meta
        from odradek.streams.replay.lineage import versions_of

        async with opened_log(context) as event_log:
            versions = await versions_of(event_log, name)
            if version is not None:
                _must_be_kept(versions, version)
            elif versions.pinned is None:
                raise UsageError(f"policy {name} is not pinned")
            body = body_of(name)
            seen = await event_log.stable_end(topics.WEIGHTS.name, 0)
            identifier = event_id("cli", body.__struct_config__.tag, name, str(version), seen)
            meta = Meta(time_ms=int(time.time() * 1000))
            event = Event.of(body, id=identifier, source="odradek-cli", meta=meta)
            return body, await event_log.append(topics.WEIGHTS.name, name, event)

    body, ref = run(context, "writing the decision", work)
    context.result({"decision": body, "at": ref}, f"{body.__struct_config__.tag} at {ref}; the controller applies it")


def _row(versions: Versions, number: int) -> Version:
    published = versions.published[number]
    marks = {"current": versions.current, "pinned": versions.pinned, "rolled back to": versions.rolled_back_to}
    return Version(
        version=number,
        parent=published.parent,
        parent_key=published.parent_key,
        batch_id=published.batch_id,
        published=datetime.fromtimestamp(versions.published_ms[number] / 1000, UTC).isoformat(timespec="seconds"),
        marks=[
            *(mark for mark, at in marks.items() if at == number),
            *(["pruned"] if number in versions.pruned else []),
        ],
        replicas=sorted(one.replica for one in versions.replicas.values() if one.version == number and one.healthy),
        refused={
            one.replica: one.detail
            for one in sorted(versions.replicas.values(), key=lambda one: one.replica)
            if one.version == number and not one.healthy
        },
    )


def _line(row: Version) -> str:
    served = f"served by {', '.join(row.replicas)}" if row.replicas else ""
    made = f"from batch {row.batch_id}" if row.batch_id else "warm start"
    made = f"copy of {row.parent_key}" if row.parent_key else made
    line = f"{row.version:5d}  {row.published}  {made:<47} {', '.join(row.marks):<9} {served}".rstrip()
    return "\n".join([line, *(f"       {replica}: {why or 'not loaded'}" for replica, why in row.refused.items())])


def _explained(found: Lineage, sessions: bool) -> str:
    from odradek.infra.cli.batch import group_lines

    if not found.batch_id:
        made = f"branched off {found.parent_key}" if found.parent_key else "no batch made it"
        return f"version {found.version} of {found.policy}: {made} (manifest {found.manifest_key})"
    members = sum(len(group.members) for group in found.groups)
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.metrics.items()))
    lines = [
        f"version {found.version} of {found.policy} = version {found.parent} trained on batch {found.batch_ordinal} "
        f"({found.batch_id}), manifest {found.manifest_key}",
        *([f"  restored from {found.parent_key}"] if found.parent_key else []),
        f"  step: {metrics or 'not committed'}",
        f"  {members} sessions of {len(found.groups)} groups; left out at the step: {len(found.left_out)}; "
        f"subjects: {', '.join(found.subjects) or 'none'}",
    ]
    return "\n".join([*lines, *(line for group in found.groups for line in group_lines(group, members=sessions))])
