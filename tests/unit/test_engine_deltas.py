"""Delta chains as an engine meets them (SkyRL 1902): applied to their own parent only, else refused by what is wanted.

The loader is the serving actor's: manifest, then weights through what the engine holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
import torch
from torch import Tensor

from odradek.actors.inference.actor import InferenceActor
from odradek.actors.inference.weights import FetchedWeights
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState, Weights
from odradek.actors.trainer.errors import CheckpointError, DeltaBaseError, IncompleteCheckpointError
from odradek.actors.trainer.manifest import WEIGHTS_DELTA, Manifest, Origin, Place
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams.blobs import MemoryStore

PLACE = Place("first", "demo", "main")


class Store(MemoryStore):
    """Objects that a test can lose or damage."""

    def lose(self, key: str) -> None:
        del self._objects[key]

    def flip(self, key: str) -> None:
        data = bytearray(self._objects[key])
        data[len(data) // 2] ^= 1
        self._objects[key] = bytes(data)


class World:
    """Versions 0 (whole) to 5 (deltas) in a store, and an engine that serves version 0."""

    def __init__(self, policy: Policy) -> None:
        self.store = Store()
        self.checkpoints = Checkpoints(self.store, PLACE, full_every=100)
        self.manifests: list[Manifest] = []
        self.digests: list[str] = []
        self.actor = InferenceActor(policy.config, self.loader)

    async def publish(self, policy: Policy) -> None:
        state = TrainerState.begin(policy, seed=7)
        parent: Weights | None = None
        for version in range(6):
            state.version = version
            with torch.no_grad():
                policy.final_norm[version] += 0.5
            origin = Origin(parent=version - 1 if version else None)
            done = await self.checkpoints.publish(state, origin, "numerics", parent)
            parent = done.weights
            assert parent is not None and (done.manifest.delta is not None) == (version > 0)
            self.manifests.append(done.manifest)
            self.digests.append(parent.digest)

    def loader(self, version: int, held: Mapping[int, Mapping[str, Tensor]]) -> FetchedWeights:
        async def fetch() -> Weights:
            return await self.checkpoints.weights(await self.checkpoints.manifest(version), held)

        weights = asyncio.run(fetch())
        return FetchedWeights(version, weights.state, weights.digest)

    async def served(self) -> tuple[int | None, str]:
        """The version served and the digest of its weights."""
        return await self.actor._command(
            lambda engine: (engine.weights.current, engine.weights.get(engine.weights.require_current()).digest)
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    policy = tiny_policy()
    world = World(policy)
    await world.publish(policy)
    await world.actor.on_weights(0)
    yield world
    await world.actor.stop()


async def test_an_engine_follows_a_chain_of_deltas_to_the_published_bits(world: World) -> None:
    for version in (1, 2, 5):  # 5 through 3 and 4, which it never served
        assert await world.actor.on_weights(version)
        assert await world.served() == (version, world.digests[version])


async def test_case_skyrl_1902_a_delta_whose_parents_were_pruned_is_refused_and_the_old_version_served(
    world: World,
) -> None:
    for version in (1, 2):
        world.store.lose(PLACE.key(version))
    with pytest.raises(DeltaBaseError, match="is a delta on version 2 with digest") as refused:
        await world.actor.on_weights(4)
    assert refused.value.wanted == world.digests[2]
    assert await world.served() == (0, world.digests[0])
    assert "weights 4 not loaded: DeltaBaseError" in (await world.actor.state()).detail


async def test_case_skyrl_1902_a_delta_on_a_version_between_is_refused_when_only_an_older_one_is_held(
    world: World,
) -> None:
    """The engine is at 2; 4 applies to 3. Applied to 2 it would serve numbers that nobody published."""
    await world.actor.on_weights(2)
    world.store.lose(PLACE.key(3))
    with pytest.raises(DeltaBaseError, match="is a delta on version 3"):
        await world.actor.on_weights(4)
    assert await world.served() == (2, world.digests[2])


async def test_case_skyrl_1902_one_flipped_byte_of_a_delta_is_refused(world: World) -> None:
    world.store.flip(world.manifests[1].shard(WEIGHTS_DELTA).key)
    with pytest.raises(CheckpointError, match=r"weights\.delta"):
        await world.actor.on_weights(1)
    assert await world.served() == (0, world.digests[0])


async def test_case_skyrl_1902_a_manifest_whose_object_is_not_uploaded_yet_is_refused_and_loads_later(
    world: World,
) -> None:
    key = world.manifests[1].shard(WEIGHTS_DELTA).key
    data = await world.store.get(key)
    world.store.lose(key)
    with pytest.raises(IncompleteCheckpointError, match=key):
        await world.actor.on_weights(1)
    assert await world.served() == (0, world.digests[0])
    await world.store.put(key, data)
    assert await world.actor.on_weights(1)
    assert await world.served() == (1, world.digests[1])
