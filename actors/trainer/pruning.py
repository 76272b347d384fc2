"""Old versions go: which ones, and in which order, so that a kill at any point costs nothing that is kept.

Kept are the newest `Keep.newest` and every `Keep.every`-th; never taken are what is current, pinned or rolled back to,
what an open group or a branch names, and what a kept version's delta needs. Guarantees (each has a test of its name):
- the log says first: `version.pruned` is appended (fenced, so that a holder that was taken over from prunes nothing),
  and its versions are removed only by the next round, after everybody could read it and everything was checked again;
- an object that a kept manifest names is never removed: shards are shared by content within a lane's place;
- a reader that comes late gets `PrunedVersionError` naming the version: manifests and a mark stay, shards go;
- a round that was cut short, or that the store refused, is finished by the next one.

Produces `version.pruned` on weights.v1. Consumes weights.v1, weights.current.v1 and groups.v1, each to its end. Waits:
for store and broker within their own deadlines. Nothing here stops training: a failure is logged and tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.errors import CheckpointError
from odradek.actors.trainer.manifest import Manifest, Place
from odradek.streams import topics
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import DecodeError, Retryable, Terminal
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed, LaneConfigured, MemberReplaced
from odradek.streams.events.weights import VersionPruned
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.replay.lineage import Versions
from odradek.streams.sealing import GroupRule
from odradek.streams.transactions import Stage

log = logging.getLogger(__name__)

TOGETHER = 5
"""Steps between two rounds. Fewer: a transaction and a round of requests after nearly each step; more: so many versions
are kept beyond what was asked for."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What stays."""

    newest: int = 50
    """So many of the newest versions; 0 prunes nothing at all."""
    every: int = 50
    """Each version that this divides; 0 for none."""

    def due(self, versions: Collection[int]) -> list[int]:
        """What of a lane's versions need not stay, oldest first."""
        if not self.newest:
            return []
        older = sorted(versions)[: -self.newest]
        return [version for version in older if not self.every or version % self.every]


class Needs:
    """What may not be taken, as a fold of the log up to its end."""

    def __init__(self, policy: str, lane: str) -> None:
        self.versions = Versions(policy)
        self._lane = lane
        self.last: list[int] = []
        """What the newest `version.pruned` named: all that a round may still have to remove."""
        self._open: dict[tuple[str, str], set[int | None]] = {}
        self._parents: set[str] = set()
        self._rule = GroupRule()
        self._positions: dict[tuple[str, int], int] = {}

    async def refresh(self, event_log: EventLog) -> None:
        """Read on. Groups come last: what they name was published before."""
        for topic in (topics.WEIGHTS.name, topics.WEIGHTS_CURRENT.name, topics.GROUPS.name):
            for number, end in sorted((await event_log.stable_ends(topic)).items()):
                start = self._positions.get((topic, number))
                if start is None:
                    start = await event_log.beginning(topic, number)
                if start >= end:
                    continue
                async for record in event_log.read(topic, number, start, end):
                    try:
                        self._apply(record.event.body, record.timestamp_ms)
                    except DecodeError:
                        continue
                self._positions[topic, number] = end

    def _apply(self, body: Any, time_ms: int) -> None:
        self.versions.apply(body, time_ms)
        match body:
            case VersionPruned() if (body.policy, body.lane) == (self.versions.policy, self._lane):
                self.last = body.versions
            case LaneConfigured() if body.parent is not None:
                self._parents.add(body.parent.manifest_key)
            case GroupOpened() if self._rule.accepts(body) and body.policy == self.versions.policy:
                self._open[body.lane, body.group_id] = {body.version, body.pinned_version}
            case GroupSealed() | GroupDiscarded() if self._rule.accepts(body):
                self._open.pop((body.lane, body.group_id), None)
            case MemberReplaced():
                self._rule.accepts(body)
            case _:
                pass

    def kept(self, place: Place) -> set[int]:
        """Versions of a place that something needs."""
        found = {self.versions.current, self.versions.pinned, self.versions.rolled_back_to}
        found |= {version for named in self._open.values() for version in named}
        found |= {place.version_of(key) for key in self._parents}
        return {version for version in found if version is not None}


def bases(manifests: Mapping[int, Manifest], kept: Iterable[int]) -> set[int]:
    """What the deltas among `kept` are made on, down to whole versions."""
    found: set[int] = set()
    waiting = list(kept)
    while waiting:
        info = manifests[waiting.pop()].delta
        if info is not None and info.base_version not in found:
            found.add(info.base_version)
            waiting.append(info.base_version)
    return found


def unshared(due: Iterable[Manifest], remaining: Iterable[Manifest]) -> list[str]:
    """Objects of pruned versions that no remaining one names, and that lie in their own place."""
    kept = {shard.key for manifest in remaining for shard in manifest.shards}
    named = {shard.key: manifest for manifest in due for shard in manifest.shards}
    return sorted(
        key
        for key, manifest in named.items()
        if key not in kept and key.startswith(Place(manifest.incarnation, manifest.policy, manifest.lane).prefix)
    )


class Pruner:
    """One lane's; lives as long as its trainer's hold of it."""

    def __init__(self, event_log: EventLog, policy: str, lane: str, keep: Keep) -> None:
        self._log = event_log
        self._policy, self._lane, self._keep = policy, lane, keep
        self._needs = Needs(policy, lane)
        self._manifests: dict[str, Manifest] = {}
        self._removed: set[str] = set()

    async def round(self, stage: Stage, checkpoints: Checkpoints, version: int) -> None:
        """After the commit of `version`: remove what the last record took, then take what is due. Errors of the stage
        are raised; those of reading and removing are logged, and the next round begins with the same."""
        if not self._keep.newest or version <= self._keep.newest or version % TOGETHER:
            return
        try:
            await self._needs.refresh(self._log)
            due = await self._due(checkpoints, version) if await self._remove(checkpoints) else []
        except (CheckpointError, Retryable, Terminal) as error:
            log.warning("lane %s: old versions stay for now: %s", self._lane, error)
            return
        if due:
            await self._take(stage, due)

    async def _due(self, checkpoints: Checkpoints, version: int) -> list[int]:
        """What of this place can be taken, oldest first. `version` was just committed; it may not be readable yet."""
        place, versions = checkpoints.place, self._needs.versions
        here = {v for v, one in versions.published.items() if one.manifest_key == place.key(v)} - versions.pruned
        due = set(self._keep.due(here | {version})) - self._needs.kept(place)
        if not due:
            return []
        manifests = {v: await self._manifest(checkpoints, v) for v in here | {version}}
        return sorted(due - bases(manifests, manifests.keys() - due))

    async def _take(self, stage: Stage, due: list[int]) -> None:
        body = VersionPruned(policy=self._policy, lane=self._lane, versions=due)
        event = Event.of(body, id=event_id("pruned", self._policy, self._lane, *due), source=f"trainer.{self._lane}")
        async with stage.transaction() as transaction:
            await transaction.append(topics.WEIGHTS.name, self._policy, event)
        await reach("pruning.after_record")
        log.info("lane %s: versions %s are pruned; the next round removes what they hold", self._lane, due)

    async def _remove(self, checkpoints: Checkpoints) -> bool:
        """Remove what the last record took; False if something of it has to wait, because it is needed after all."""
        place = checkpoints.place
        last = self._needs.versions.pruned.intersection(self._needs.last)
        waiting = last & self._needs.kept(place)
        due = sorted(version for version in last - waiting if place.key(version) not in self._removed)
        if not due:
            return not waiting
        for version in due:
            await checkpoints.mark_pruned(version)
        await reach("pruning.after_mark")
        remaining = set(await checkpoints.versions()) - set(await checkpoints.pruned())
        gone = unshared(
            [await self._manifest(checkpoints, version) for version in due],
            [await self._manifest(checkpoints, version) for version in remaining],
        )
        for key in gone:
            await checkpoints.store.remove(key)
        self._removed.update(place.key(version) for version in due)
        log.info("lane %s: %d objects of pruned versions %s removed", self._lane, len(gone), due)
        return not waiting

    async def _manifest(self, checkpoints: Checkpoints, version: int) -> Manifest:
        """Manifests never change, so each is read once."""
        key = checkpoints.place.key(version)
        if key not in self._manifests:
            self._manifests[key] = await checkpoints.manifest(version)
        return self._manifests[key]
