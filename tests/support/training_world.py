"""One lane with batches to train, and one store of versions: the real assembler and the real trainer, a tiny policy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odradek.actors.trainer.checkpoint import FULL_EVERY, Checkpoints
from odradek.actors.trainer.errors import IncompleteCheckpointError
from odradek.actors.trainer.loop import TrainerLoop
from odradek.actors.trainer.manifest import Manifest, Place
from odradek.actors.trainer.pruning import Keep
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.blobs import S3Store
from support.lane_world import LaneWorld, stopped, until

TRAINING = {"optimiser": {"learning_rate": 1e-2, "warmup_steps": 0}}


@dataclass
class TrainingWorld:
    """One lane with batches to train, and one store of versions."""

    lane: LaneWorld
    store: S3Store
    warm_start: Path
    incarnation: str
    keep: Keep | None = None
    full_every: int = FULL_EVERY

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, Place(self.incarnation, self.lane.policy, self.lane.lane), self.full_every)

    def loop(self, **changes: Any) -> TrainerLoop:
        lane = self.lane.configuration(**changes)
        return TrainerLoop(self.lane.log, self.checkpoints, lane, self.warm_start, self.keep)

    async def assemble(self, count: int, *, already: int = 0, groups: int | None = None, **group: Any) -> None:
        """`count` batches, of one new group each unless told otherwise."""
        for _ in range(count if groups is None else groups):
            await self.lane.group(**group)
        task = asyncio.create_task(Assembler(self.lane.log, self.lane.lane).run())

        async def enough() -> bool:
            return len(await self.lane.batches()) >= already + count

        try:
            await until(task, enough)
        finally:
            await stopped(task)

    async def train(self, steps: int, *, version: int | None = None) -> TrainerLoop:
        """Run a fresh holder until the lane has that many committed steps, and the version that they lead to."""
        loop = self.loop()
        task = asyncio.create_task(loop.run())

        async def enough() -> bool:
            return len(await self.lane.steps()) >= steps and loop.version >= (steps if version is None else version)

        try:
            await until(task, enough)
        finally:
            await stopped(task)
        return loop

    async def manifest(self, version: int) -> Manifest | None:
        try:
            return await self.checkpoints.manifest(version)
        except IncompleteCheckpointError:
            return None

    async def bits(self, version: int) -> tuple[str, list[tuple[str, str]]]:
        """Digests of all that a version holds: weights and every shard, optimiser and generator among them."""
        manifest = await self.checkpoints.manifest(version)
        return manifest.weights_digest, [(shard.name, shard.sha256) for shard in manifest.shards]
