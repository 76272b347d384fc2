"""A new incarnation of a lane, where log and object store were restored from different moments.

What it does, and all it does: finds the newest version that the log names and the store has whole, copies it (weights
and optimiser) to a place that no history ever used, and commits incarnation.begun and version.published in one
transaction under the trainer's transactional id, so that a trainer still alive is fenced. Nothing is deleted and no
manifest of an earlier incarnation is looked at again. Batches that the log still has are trained again from there;
what can't come back is named in the result.

A lane whose log and store fit is left alone: the log's newest version is whole, and the store has no manifest that the
log does not know, or only the one that a trainer killed between manifest and commit left for the next batch, which the
next trainer adopts. So restoring twice is restoring once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState
from odradek.actors.trainer.errors import CheckpointError, RestoreError
from odradek.actors.trainer.manifest import Manifest, Origin, Place
from odradek.kernels.numerics import numerics_id
from odradek.streams import topics
from odradek.streams.blobs import ObjectStore
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.batches import BatchAssembled, IncarnationBegun, StepCompleted
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.lineage import Versions
from odradek.streams.replay.select import bodies, readable
from odradek.streams.transactions import Stage


@dataclass(slots=True)
class LaneHistory:
    """What the log says of one lane's training."""

    lane: str
    policy: str
    published: dict[int, VersionPublished]
    """The versions that stand: those that an earlier restore gave up are not among them."""
    known: set[str]
    """Manifests of all versions ever published."""
    offsets: dict[int, int] = field(default_factory=dict)
    """By version the offset on batches.v1 after which its trainer goes on."""
    batches: dict[int, BatchAssembled] = field(default_factory=dict)
    """By ordinal."""

    @property
    def newest(self) -> int:
        return max(self.published)

    def place(self) -> Place:
        """Where the newest version lies: the incarnation that the log is in."""
        return Place.of_key(self.published[self.newest].manifest_key)[0]


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one lane."""

    lane: str
    policy: str
    begun: bool
    """False: log and store fit, nothing is to be done."""
    incarnation: str
    version: int
    """Newest version complete in both."""
    manifest_key: str
    restored_from: str = ""
    log_only: list[str] = []
    """Manifests that the log names and the store has not whole, with the reason: given up."""
    store_only: list[str] = []
    """Manifests in the store that the log does not know: given up, never adopted."""
    train_again: list[str] = []
    """Batches on the log that are trained again, in order."""
    stops_at: str = ""
    """The first batch still to be trained that the log no longer gives, because the store lost an object of a member's:
    there the lane stops."""


async def histories(event_log: EventLog) -> list[LaneHistory]:
    """Every lane that has a version, in the order of their first."""
    lanes: dict[tuple[str, str], tuple[Versions, set[str]]] = {}
    async for body in bodies(event_log, topics.WEIGHTS.name):
        if isinstance(body, VersionPublished) and body.lane:
            versions, known = lanes.setdefault((body.lane, body.policy), (Versions(body.policy), set()))
            versions.apply(body, 0)
            known.add(body.manifest_key)
    found = [
        LaneHistory(lane, policy, versions.published, known) for (lane, policy), (versions, known) in lanes.items()
    ]
    by_lane = {one.lane: one for one in found}
    async for record in readable(event_log, topics.BATCHES.name):
        body = record.event.body
        one = by_lane.get(body.lane)
        match body:
            case BatchAssembled() if one is not None:
                one.batches[body.ordinal] = body
            case StepCompleted() if one is not None:
                one.offsets[body.step] = body.batch_offset
            case IncarnationBegun() if one is not None:
                one.offsets[body.version] = body.batch_offset
            case _:
                pass
    return found


async def restore(
    event_log: EventLog,
    store: ObjectStore,
    history: LaneHistory,
    incarnation: Incarnation,
    warm_start: Path,
    *,
    reason: str = "",
    dry_run: bool = False,
    lost: Mapping[str, str] | None = None,
) -> Restored:
    """Begin `incarnation` for the lane, unless its log and store fit. `dry_run` only says what that would do. `lost`:
    by session an object without which it can't be read."""
    manifest, log_only = await _newest_complete(store, history)
    store_only = await _unknown(store, history, incarnation.base)
    fits = manifest is not None and not log_only and await _fits(store, history, store_only)
    version = manifest.version if manifest is not None else 0
    ahead = [batch for ordinal, batch in sorted(history.batches.items()) if ordinal >= version]
    found = Restored(
        lane=history.lane,
        policy=history.policy,
        begun=not fits,
        incarnation=history.place().incarnation if fits else incarnation.name,
        version=version,
        manifest_key=history.published[version].manifest_key if version in history.published else "",
        stops_at=_stops_at(ahead, lost or {}),
    )
    if fits:
        return found
    found = msgspec.structs.replace(
        found,
        restored_from=manifest.name if manifest is not None else "",
        log_only=log_only,
        store_only=store_only,
        train_again=[batch.batch_id for batch in ahead],
    )
    if dry_run:
        return found
    begun = await _begin(event_log, store, history, manifest, incarnation.name, warm_start, reason)
    return msgspec.structs.replace(found, manifest_key=begun.manifest_key)


def _stops_at(ahead: Iterable[BatchAssembled], lost: Mapping[str, str]) -> str:
    for batch in ahead:
        for member in batch.members:
            if member.session_id in lost:
                return f"batch {batch.batch_id}: session {member.session_id} needs {lost[member.session_id]}"
    return ""


async def _newest_complete(store: ObjectStore, history: LaneHistory) -> tuple[Manifest | None, list[str]]:
    """The newest version that is whole in the store as the log names it, and the newer ones that are not."""
    passed_over: list[str] = []
    for version, published in sorted(history.published.items(), reverse=True):
        place, _ = Place.of_key(published.manifest_key)
        try:
            return await Checkpoints(store, place).complete(version, published.manifest_sha256), passed_over
        except CheckpointError as error:
            passed_over.append(f"{published.manifest_key}: {error}")
    return None, passed_over


async def _unknown(store: ObjectStore, history: LaneHistory, base: str) -> list[str]:
    """Manifests of the lane that the log does not know, in the incarnation that it is in or a later one. What earlier
    incarnations left behind was given up when they ended."""
    began = _number(history.place().incarnation, base)
    found = []
    for key in await store.list(base):
        try:
            place, _ = Place.of_key(key)
        except ValueError:
            continue
        number = _number(place.incarnation, base)
        ours = (place.policy, place.lane) == (history.policy, history.lane)
        if ours and number is not None and number >= (began or 0) and key not in history.known:
            found.append(key)
    return sorted(found, key=lambda key: (key.rpartition("/")[0], Place.of_key(key)[1]))


async def _fits(store: ObjectStore, history: LaneHistory, store_only: list[str]) -> bool:
    """Whether what the store has beyond the log is what a killed trainer may leave."""
    if not store_only:
        return True
    batch, place = history.batches.get(history.newest), history.place()
    if batch is None or store_only != [place.key(history.newest + 1)]:
        return False
    try:
        origin = (await Checkpoints(store, place).manifest(history.newest + 1)).origin
    except CheckpointError:
        return False
    return (origin.parent, origin.batch_id, origin.batch_root) == (history.newest, batch.batch_id, batch.merkle_root)


async def _begin(
    event_log: EventLog,
    store: ObjectStore,
    history: LaneHistory,
    manifest: Manifest | None,
    incarnation: str,
    warm_start: Path,
    reason: str,
) -> IncarnationBegun:
    fresh = Checkpoints(store, Place(incarnation, history.policy, history.lane))
    if manifest is not None:
        state, _ = await Checkpoints(store, Place.of_key(manifest.name)[0]).restore(manifest)
        origin = msgspec.structs.replace(manifest.origin, copied_from=manifest.name)
        published = await fresh.publish(state, origin, manifest.numerics_id, consent=manifest.consent)
    elif min(history.published) == 0:
        state = TrainerState.begin(Policy.load_hf(warm_start), seed=0)
        published = await fresh.publish(state, Origin(parent=None), numerics_id())
    else:
        raise RestoreError(
            f"lane {history.lane}: no version of policy {history.policy} is whole in the object store, and it did not "
            f"begin with the warm start but with version {min(history.published)}: branch off again"
        )
    version = published.manifest.version
    begun = IncarnationBegun(
        lane=history.lane,
        policy=history.policy,
        incarnation=incarnation,
        version=version,
        batch_offset=history.offsets.get(version, -1),
        manifest_key=published.key,
        manifest_sha256=published.sha256,
        restored_from=manifest.name if manifest is not None else "",
        given_up=sorted(number for number in history.published if number > version),
        reason=reason,
    )
    await _commit(event_log, begun, published.manifest)
    return begun


async def _commit(event_log: EventLog, begun: IncarnationBegun, manifest: Manifest) -> None:
    """Both records or none, under the trainer's id: one that still runs is fenced and stops."""
    version = VersionPublished(
        policy=begun.policy,
        version=begun.version,
        manifest_key=begun.manifest_key,
        manifest_sha256=begun.manifest_sha256,
        lane=begun.lane,
        step=begun.version,
        batch_id=manifest.origin.batch_id,
        parent=manifest.origin.parent,
        numerics_id=manifest.numerics_id,
        parent_key=begun.restored_from,
        restored=True,
    )
    outputs = [(topics.BATCHES.name, topics.BATCHES.partition_of(begun.lane)), (topics.WEIGHTS.name, 0)]
    source = "odradek-restore"
    async with Stage(event_log, f"trainer.{begun.lane}", outputs) as stage, stage.transaction() as transaction:
        event = Event.of(begun, id=event_id("incarnation", begun.manifest_key), source=source)
        await transaction.append(topics.BATCHES.name, begun.lane, event)
        shown = Event.of(version, id=event_id("version", begun.manifest_key), source=source)
        await transaction.append(topics.WEIGHTS.name, begun.policy, shown)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One after the first, which is named `base`; the others are BASE-rN."""

    base: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.base}-r{self.number}"

    @classmethod
    async def unused(cls, event_log: EventLog, store: ObjectStore, base: str) -> Incarnation:
        """The first that neither log nor store has seen."""
        published = [one async for one in bodies(event_log, topics.WEIGHTS.name) if isinstance(one, VersionPublished)]
        keys = [one.manifest_key for one in published] + await store.list(base)
        seen = [number for key in keys if (number := _number(key.partition("/")[0], base)) is not None]
        return cls(base, max(seen, default=0) + 1)


def _number(incarnation: str, base: str) -> int | None:
    """0 for the first incarnation, N for BASE-rN, None for another deployment's."""
    if incarnation == base:
        return 0
    tail = incarnation.removeprefix(f"{base}-r")
    return int(tail) if tail != incarnation and tail.isdecimal() else None
