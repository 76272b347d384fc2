"""Weight deltas: exact, and refused with what is wanted whenever the base is not the very one."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from odradek.actors.inference.weights import state_digest
from odradek.actors.trainer import delta
from odradek.actors.trainer.checkpoint import Checkpoints, Published, TrainerState
from odradek.actors.trainer.delta import DeltaInfo
from odradek.actors.trainer.errors import CheckpointError, DeltaBaseError, IncompleteCheckpointError
from odradek.actors.trainer.manifest import WEIGHTS, WEIGHTS_DELTA, Origin, Place
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams.blobs import MemoryStore

PLACE = Place("first", "demo", "main")


class DamagedStore(MemoryStore):
    def lose(self, key: str) -> None:
        del self._objects[key]

    def flip(self, key: str) -> None:
        data = bytearray(self._objects[key])
        data[len(data) // 2] ^= 1
        self._objects[key] = bytes(data)


def info(base: dict[str, Tensor], result: dict[str, Tensor]) -> DeltaInfo:
    return DeltaInfo(0, state_digest(base), state_digest(result))


async def chain(store: MemoryStore, newest: int = 5) -> list[Published]:
    """v0 whole, v1 to `newest` as deltas, each changing a few weights, as RL steps in bf16 do."""
    checkpoints = Checkpoints(store, PLACE, full_every=1000)
    state = TrainerState.begin(tiny_policy(), 0)
    out = [await checkpoints.publish(state, Origin(None), "numerics")]
    for version in range(1, newest + 1):
        with torch.no_grad():
            state.policy.embed[version] += 0.5
        state.version = version
        out.append(await checkpoints.publish(state, Origin(version - 1), "numerics", out[-1].weights))
    assert [p.manifest.delta is not None for p in out] == [False] + [True] * newest
    return out


def states(published: list[Published]) -> dict[int, dict[str, Tensor]]:
    return {p.manifest.version: dict(p.weights.state) for p in published if p.weights is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rebuilds_every_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    base = {"a": torch.randn(33, 7, generator=generator).to(dtype), "b": torch.randn(5, generator=generator).to(dtype)}
    result = {"a": base["a"].clone(), "b": base["b"].clone()}
    result["a"][3, 1] = -0.0
    result["a"][4] = float("nan")
    data = delta.make(base, result)
    rebuilt = delta.apply(base, data, info(base, result))
    for name in base:
        assert torch.equal(rebuilt[name].view(torch.uint8), result[name].view(torch.uint8))


def test_delta_of_few_changes_is_small_and_leaves_unchanged_tensors_out() -> None:
    base = {"a": torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)), "b": torch.ones(1000)}
    result = {"a": base["a"].clone(), "b": base["b"]}
    result["a"][::100] *= 1.001
    data = delta.make(base, result)
    assert len(data) < base["a"].nbytes / 20
    assert b"b" not in [name.encode() for name, _ in msgspec.msgpack.decode(data)]


def test_delta_is_deterministic() -> None:
    base = {"a": torch.zeros(64), "b": torch.ones(64)}
    result = {"b": torch.full((64,), 1.5), "a": torch.ones(64)}
    assert delta.make(base, result) == delta.make(dict(reversed(base.items())), result)


def test_delta_between_other_shapes_is_refused() -> None:
    with pytest.raises(CheckpointError, match="other shapes: a"):
        delta.make({"a": torch.zeros(3)}, {"a": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="other shapes: b"):
        delta.make({"a": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(1)})


def test_other_base_is_refused_naming_what_is_wanted() -> None:
    base, result = {"a": torch.zeros(8)}, {"a": torch.ones(8)}
    wanted = state_digest(base)
    with pytest.raises(DeltaBaseError, match=r"held is .* fetch version 0 first") as caught:
        delta.apply({"a": torch.full((8,), 2.0)}, delta.make(base, result), info(base, result))
    assert caught.value.wanted == wanted and wanted in str(caught.value)


def test_flipped_byte_is_refused_and_the_base_is_left_alone() -> None:
    base = {"a": torch.randn(512, generator=torch.Generator().manual_seed(0))}
    result = {"a": base["a"] * 1.01}
    before = base["a"].clone()
    data = delta.make(base, result)
    for at in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(CheckpointError):
            delta.apply(base, bytes(damaged), info(base, result))
    assert torch.equal(base["a"], before)


async def test_chain_of_deltas_leads_to_the_published_weights() -> None:
    store = MemoryStore()
    published = await chain(store)
    checkpoints = Checkpoints(store, PLACE)
    for p in published:
        weights = await checkpoints.weights(p.manifest)
        assert weights.version == p.manifest.version and weights.digest == p.manifest.weights_digest


async def test_held_base_saves_the_rest_of_the_chain() -> None:
    store = DamagedStore()
    published = await chain(store)
    for p in published[:4]:  # only v4's and v5's own objects are left
        store.lose(p.key)
    held = {3: states(published)[3]}
    weights = await Checkpoints(store, PLACE).weights(published[5].manifest, held)
    assert weights.digest == published[5].manifest.weights_digest


async def test_pruned_parents_are_never_skipped() -> None:
    """Deltas v1 to v5, v1 and v2 removed, engine at v0: later deltas must not be applied to the original base."""
    store = DamagedStore()
    published = await chain(store)
    for p in published[1:3]:
        store.lose(p.key)
        store.lose(p.manifest.shard(WEIGHTS_DELTA).key)
    with pytest.raises(DeltaBaseError, match=r"version 2 .* neither held nor in the store") as caught:
        await Checkpoints(store, PLACE).weights(published[5].manifest, {0: states(published)[0]})
    assert caught.value.wanted == published[2].manifest.weights_digest


async def test_delta_sent_to_an_older_version_is_refused() -> None:
    """v4 offered to an engine at v2."""
    store = MemoryStore()
    published = await chain(store)
    link = published[4].manifest
    assert link.delta is not None
    data = await store.get(link.shard(WEIGHTS_DELTA).key)
    with pytest.raises(DeltaBaseError, match=r"applies to version 3 .* \(version 2\)"):
        delta.apply(states(published)[2], data, link.delta, held_version=2)


async def test_flipped_byte_in_the_store_is_refused_by_name() -> None:
    store = DamagedStore()
    published = await chain(store)
    store.flip(published[4].manifest.shard(WEIGHTS_DELTA).key)
    with pytest.raises(IncompleteCheckpointError, match=r"first/demo/main/4: shard 'weights\.delta'"):
        await Checkpoints(store, PLACE).weights(published[5].manifest)


async def test_manifest_whose_object_is_not_uploaded_is_refused_by_name() -> None:
    store = DamagedStore()
    published = await chain(store)
    store.lose(published[0].manifest.shard(WEIGHTS).key)
    with pytest.raises(IncompleteCheckpointError, match=r"main/0: shard 'weights' cannot be used: .*restore"):
        await Checkpoints(store, PLACE).weights(published[5].manifest)


async def test_every_nth_version_is_whole() -> None:
    store = MemoryStore()
    checkpoints = Checkpoints(store, PLACE, full_every=3)
    state = TrainerState.begin(tiny_policy(), 0)
    parent, kinds = None, []
    for version in range(7):
        state.version = version
        published = await checkpoints.publish(state, Origin(version - 1 if version else None), "numerics", parent)
        parent = published.weights
        kinds.append(published.manifest.delta is None)
    assert kinds == [True, False, False, True, False, False, True]


async def test_delta_that_saves_nothing_is_not_stored() -> None:
    store = MemoryStore()
    checkpoints = Checkpoints(store, PLACE, full_every=1000)
    first = await checkpoints.publish(TrainerState.begin(tiny_policy(1), 0), Origin(None), "numerics")
    other = TrainerState.begin(tiny_policy(2), 0)
    other.version = 1
    second = await checkpoints.publish(other, Origin(0), "numerics", first.weights)
    assert second.manifest.delta is None
