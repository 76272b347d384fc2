"""What may be served: checked whole before the swap, refused by name, the old version untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.small_model import CONFIG
from torch import Tensor

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.errors import WeightsRefusedError
from odradek.actors.inference.weights import WeightStore, build, state_digest
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.errors import CheckpointLoadError
from odradek.actors.policy.hf import save_hf, to_hf_state
from odradek.actors.policy.model import Policy

STATE = to_hf_state(Policy(CONFIG, seed=1))
OTHER = to_hf_state(Policy(CONFIG, seed=2))
NORM = "model.norm.weight"


def nan(state: dict[str, Tensor]) -> None:
    state[NORM] = state[NORM].clone().fill_(float("nan"))


def missing(state: dict[str, Tensor]) -> None:
    del state[NORM]


def extra(state: dict[str, Tensor]) -> None:
    state["model.extra"] = torch.zeros(1)


def shape(state: dict[str, Tensor]) -> None:
    state[NORM] = torch.ones(33)


def integer(state: dict[str, Tensor]) -> None:
    state[NORM] = torch.ones(32, dtype=torch.int32)


def untied(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = torch.zeros(97, 32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nan, "model.norm.weight holds NaN"),
        (missing, "model.norm.weight missing"),
        (extra, "model.extra unknown"),
        (shape, r"model.norm.weight has shape \(33,\), expected \(32,\)"),
        (integer, "model.norm.weight has dtype torch.int32"),
        (untied, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(damage: Callable[[dict[str, Tensor]], None], message: str) -> None:
    state = dict(STATE)
    damage(state)
    with pytest.raises(WeightsRefusedError, match=message):
        build(CONFIG, 4, state)


def test_one_flipped_byte_is_refused_by_the_publishers_digest() -> None:
    digest = state_digest(STATE)
    assert build(CONFIG, 1, STATE, digest).digest == digest
    flipped = dict(STATE)
    raw = flipped[NORM].clone()
    raw.view(torch.uint8)[0] ^= 1
    flipped[NORM] = raw
    with pytest.raises(WeightsRefusedError, match=f"expected {digest}; fetch them again"):
        build(CONFIG, 1, flipped, digest)


def test_other_tensors_under_a_held_number_are_refused_and_the_old_ones_stay() -> None:
    engine = Engine(CONFIG, "numerics")
    engine.install(build(CONFIG, 1, STATE))
    with pytest.raises(WeightsRefusedError, match="a version number is never used twice"):
        engine.install(build(CONFIG, 1, OTHER))
    assert engine.weights.get(1).digest == state_digest(STATE)
    engine.install(build(CONFIG, 1, STATE))  # the same again is fine
    assert engine.stats().reloads == 0


def test_weights_of_another_shape_are_refused() -> None:
    engine = Engine(CONFIG, "numerics")
    other = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=8)
    with pytest.raises(WeightsRefusedError, match="another shape"):
        engine.install(build(other, 1, to_hf_state(Policy(other))))


def test_bf16_weights_are_kept_as_published_for_deltas() -> None:
    """A delta applies to the published bits; the float32 copy that computes has others."""
    published = {name: t.bfloat16() for name, t in STATE.items()}
    held = build(CONFIG, 1, published)
    assert held.state[NORM].dtype == torch.bfloat16
    assert held.policy.embed.dtype == torch.float32
    assert state_digest(held.state) == state_digest(published)


def test_prune_keeps_current_its_predecessor_pins_and_what_is_needed() -> None:
    store = WeightStore(keep=2)
    for version in range(6):
        store.install(build(CONFIG, version, STATE), current=version != 1)
    assert store.prune(needed=[0]) == [2, 3]
    assert store.versions == [0, 1, 4, 5]
    store.unpin(1)
    assert store.prune(needed=[]) == [0, 1]
    assert (store.versions, store.current) == ([4, 5], 5)


# -- checkpoint directories (sglang 32279, vllm 53019): never random values ------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_hf(Policy(CONFIG, seed=1), tmp_path, max_shard_bytes=sum(t.nbytes for t in STATE.values()) * 2 // 3)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    return tmp_path


def test_a_missing_shard_is_refused_by_name(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointLoadError, match=r"model-00002-of-00002.safetensors is missing"):
        Policy.load_hf(sharded)


def test_a_shard_cut_by_100_bytes_is_refused_by_name(sharded: Path) -> None:
    path = sharded / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointLoadError, match=r"model-00001-of-00002.safetensors .* cut short"):
        Policy.load_hf(sharded)


def test_a_tied_model_without_head_tensor_equals_the_tied_reference(tmp_path: Path) -> None:
    policy = Policy(CONFIG, seed=1)
    policy.save_hf(tmp_path)
    file = tmp_path / "model.safetensors"
    assert "lm_head.weight" not in load_file(file)
    without = build(CONFIG, 1, to_hf_state(Policy.load_hf(tmp_path)))
    save_file({**load_file(file), "lm_head.weight": STATE["model.embed_tokens.weight"]}, file, {"format": "pt"})
    with_head = build(CONFIG, 1, to_hf_state(Policy.load_hf(tmp_path)))
    assert torch.equal(without.policy.head_weight, policy.embed)
    assert without.digest == with_head.digest
