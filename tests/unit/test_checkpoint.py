"""Checkpoints: one winner a version, resumed bit for bit, and nothing incomplete is ever taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load

from odradek.actors.policy.hf import load_hf
from odradek.actors.trainer.checkpoint import Checkpoints, Published, TrainerState, fetch_weights
from odradek.actors.trainer.errors import AdoptionError, CheckpointError, IncompleteCheckpointError
from odradek.actors.trainer.manifest import Manifest, Origin, Place, check_adoptable
from odradek.actors.trainer.step import StepSettings, train_step
from odradek.actors.trainer.testing import random_batch, tiny_policy
from odradek.streams.blobs import MemoryStore

PLACE = Place("first", "demo", "main")
SETTINGS = StepSettings()
CONFIGURATION: dict[str, Any] = msgspec.to_builtins(SETTINGS)


class DamagedStore(MemoryStore):
    """A store whose objects a test can damage; no content address protects against that, only reading does."""

    def shorten(self, key: str) -> None:
        self._objects[key] = self._objects[key][:-1]

    def lose(self, key: str) -> None:
        del self._objects[key]


def origin(version: int) -> Origin:
    if version == 0:
        return Origin(parent=None, configuration=CONFIGURATION)
    return Origin(version - 1, f"batch-{version - 1}", 100 + version, CONFIGURATION)


def train(state: TrainerState) -> TrainerState:
    """One step in place on the batch that belongs to the version."""
    batch = random_batch([5, 3, 8], seed=state.version)
    train_step(state.policy, state.optimiser, batch, SETTINGS, state.rng, step=state.version + 1)
    state.version += 1
    return state


async def publish_versions(checkpoints: Checkpoints, newest: int) -> list[Published]:
    state = TrainerState.begin(tiny_policy(), seed=7)
    out: list[Published] = [await checkpoints.publish(state, origin(0), "numerics")]
    for version in range(1, newest + 1):
        train(state)
        out.append(await checkpoints.publish(state, origin(version), "numerics", out[-1].weights))
    return out


def same(a: TrainerState, b: TrainerState) -> bool:
    pairs = zip(a.policy.parameters(), b.policy.parameters(), strict=True)
    return (
        a.version == b.version
        and a.optimiser.updates == b.optimiser.updates
        and torch.equal(a.rng.get_state(), b.rng.get_state())
        and all(torch.equal(p, q) for p, q in pairs)
    )


async def test_resumed_trainer_goes_on_bit_for_bit() -> None:
    checkpoints = Checkpoints(MemoryStore(), PLACE)
    state = train(TrainerState.begin(tiny_policy(), seed=7))
    published = await checkpoints.publish(state, origin(1), "numerics")
    resumed, weights = await checkpoints.restore(published.manifest)
    assert same(state, resumed) and weights.digest == published.manifest.weights_digest
    for _ in range(2):
        train(state)
        train(resumed)
    assert same(state, resumed)


async def test_manifest_has_one_winner_and_the_loser_loads_it() -> None:
    store = MemoryStore()
    first = train(TrainerState.begin(tiny_policy(), seed=7))
    other = train(TrainerState.begin(tiny_policy(), seed=8))
    won = await Checkpoints(store, PLACE).publish(first, origin(1), "numerics")
    lost = await Checkpoints(store, PLACE).publish(other, origin(1), "numerics")
    assert won.won and not lost.won
    assert (lost.manifest, lost.sha256) == (won.manifest, won.sha256)
    winner, _ = await Checkpoints(store, PLACE).restore(lost.manifest)
    assert same(winner, first) and not same(winner, other)


async def test_two_trainers_of_the_same_step_write_the_same_manifest() -> None:
    a = await publish_versions(Checkpoints(MemoryStore(), PLACE), 2)
    b = await publish_versions(Checkpoints(MemoryStore(), PLACE), 2)
    assert [p.sha256 for p in a] == [p.sha256 for p in b]


async def test_manifest_stands_at_incarnation_policy_lane_version() -> None:
    store = MemoryStore()
    published = await publish_versions(Checkpoints(store, PLACE), 1)
    assert [p.key for p in published] == ["first/demo/main/0", "first/demo/main/1"]
    assert await store.exists("first/demo/main/1")
    assert Place.of_key("first/demo/main/1") == (PLACE, 1)
    with pytest.raises(ValueError, match="no manifest key"):
        Place.of_key("first/demo/1")
    with pytest.raises(ValueError, match="without '/'"):
        Place("a/b", "demo", "main")


async def test_other_incarnation_and_branch_do_not_collide() -> None:
    store = MemoryStore()
    state = TrainerState.begin(tiny_policy(), seed=7)
    for place in (PLACE, Place("second", "demo", "main"), Place("first", "branch", "main")):
        assert (await Checkpoints(store, place).publish(state, origin(0), "numerics")).won


async def test_case_rlinf_1469_kill_between_shards_and_manifest_leaves_the_last_complete_version() -> None:
    """Killed mid-save: shards of version 3 are there, its manifest (weights, data position) is not."""

    class Killed(Exception):
        pass

    class KilledStore(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes) -> bool:
            if key == PLACE.key(3):
                raise Killed
            return await super().put_if_absent(key, data)

    store = KilledStore()
    checkpoints = Checkpoints(store, PLACE)
    with pytest.raises(Killed):
        await publish_versions(checkpoints, 3)
    stray = len(await store.list(f"{PLACE.prefix}blobs/"))
    assert await checkpoints.versions() == [0, 1, 2]
    assert (await checkpoints.complete(2)).origin == origin(2)
    assert stray > 3 * 2, "the lost version's shards really were there"


@pytest.mark.parametrize("shard", ["weights", "trainer"])
@pytest.mark.parametrize("damage", ["shorten", "lose"])
async def test_case_rlinf_1469_a_checkpoint_that_is_not_whole_is_refused_naming_the_shard(
    shard: str, damage: str
) -> None:
    """One file of the newest checkpoint is shorter by a byte, or gone; the one before is whole, position included."""
    store = DamagedStore()
    checkpoints = Checkpoints(store, PLACE, full_every=1)
    published = await publish_versions(checkpoints, 3)
    getattr(store, damage)(published[3].manifest.shard(shard).key)
    before = await checkpoints.complete(2)
    assert before == published[2].manifest
    assert before.origin.input_offset == 102 and before.origin.batch_id == "batch-1"
    for use in (checkpoints.complete(3), checkpoints.restore(published[3].manifest)):
        with pytest.raises(IncompleteCheckpointError, match=f"first/demo/main/3: shard '{shard}'"):
            await use


async def test_damaged_manifest_is_refused_by_name() -> None:
    store = DamagedStore()
    checkpoints = Checkpoints(store, PLACE)
    await publish_versions(checkpoints, 2)
    store.shorten(PLACE.key(2))
    with pytest.raises(IncompleteCheckpointError, match=r"first/demo/main/2 .* damaged"):
        await checkpoints.complete(2)
    assert (await checkpoints.complete(1)).version == 1


@pytest.mark.parametrize(
    "change",
    [
        {"parent": 5},
        {"batch_id": "batch-of-another-log"},
        {"input_offset": 999},
        {"configuration": {"objective": {"surrogate": "cispo"}}},
    ],
    ids=lambda c: next(iter(c)),
)
async def test_manifest_of_anything_else_stops_the_lane(change: dict[str, Any]) -> None:
    checkpoints = Checkpoints(MemoryStore(), PLACE)
    published = await publish_versions(checkpoints, 1)
    expected = msgspec.structs.replace(origin(1), **change)
    with pytest.raises(AdoptionError, match=f"{next(iter(change))} is .* expected .*odradek restore"):
        check_adoptable(published[1].manifest, 1, expected)
    with pytest.raises(AdoptionError, match="version is 1, expected 2"):
        check_adoptable(published[1].manifest, 2, origin(1))


async def test_log_names_the_manifest_by_digest() -> None:
    checkpoints = Checkpoints(MemoryStore(), PLACE)
    published = await publish_versions(checkpoints, 0)
    assert await checkpoints.manifest(0, published[0].sha256) == published[0].manifest
    with pytest.raises(CheckpointError, match="the log says"):
        await checkpoints.manifest(0, "0" * 64)
    with pytest.raises(IncompleteCheckpointError, match="no manifest first/demo/main/9"):
        await checkpoints.manifest(9)


async def test_published_weights_open_as_a_hugging_face_directory(tmp_path: Path) -> None:
    store = MemoryStore()
    state = train(TrainerState.begin(tiny_policy(), seed=7))
    published = await Checkpoints(store, PLACE).publish(state, origin(1), "numerics")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(published.manifest.model))
    (tmp_path / "model.safetensors").write_bytes(await store.get(published.manifest.shard("weights").key))
    opened = load_hf(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(opened.parameters(), state.policy.parameters(), strict=True))


async def test_reader_of_version_published_gets_verified_weights() -> None:
    store = MemoryStore()
    published = await publish_versions(Checkpoints(store, PLACE), 3)
    manifest, weights = await fetch_weights(store, published[3].key, published[3].sha256)
    assert manifest.version == 3 and weights.digest == manifest.weights_digest
    with pytest.raises(CheckpointError, match="the log says"):
        await fetch_weights(store, published[3].key, published[2].sha256)


async def test_manifest_json_round_trip_and_shard_contents() -> None:
    store = MemoryStore()
    published = (await publish_versions(Checkpoints(store, PLACE), 1))[1]
    assert msgspec.json.decode(published.manifest.encode(), type=Manifest) == published.manifest
    assert published.manifest.optimiser_updates == 2  # two minibatches
    tensors = load(await store.get(published.manifest.shard("trainer").key))
    assert "rng" in tensors and "exp_avg.embed" in tensors and "exp_avg_sq.final_norm" in tensors
