"""Hugging Face directories: whatever is missing or damaged is refused by name, before anything serves."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.directory import EMBED, HEAD
from odradek.actors.policy.errors import CheckpointLoadError, UnsupportedModelError
from odradek.actors.policy.hf import load_hf, load_hf_state, save_hf, to_hf_state
from odradek.actors.policy.model import Policy

TIED = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
UNTIED = msgspec.structs.replace(TIED, tie_word_embeddings=False)
MOE = msgspec.structs.replace(TIED, num_experts=3, moe_intermediate_size=24)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_hf(Policy(UNTIED), tmp_path, max_shard_bytes=40_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 2
    return tmp_path


def same(a: Policy, b: Policy) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("config", [TIED, UNTIED, MOE], ids=["tied", "untied", "moe"])
def test_saved_and_loaded_weights_are_the_same_bits(config: ModelConfig, tmp_path: Path) -> None:
    policy = Policy(config, seed=3)
    save_hf(policy, tmp_path)
    again = load_hf(tmp_path)
    assert again.config == config and same(policy, again)


def test_sharded_checkpoint_loads_whole(sharded: Path) -> None:
    assert same(load_hf(sharded), Policy(UNTIED))


def test_case_sglang_32279_missing_shard_is_refused_by_name(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointLoadError, match=r"model-00002-of-00002\.safetensors is missing"):
        load_hf(sharded)


def test_case_sglang_32279_shard_cut_by_100_bytes_is_refused_by_name(sharded: Path) -> None:
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointLoadError, match=r"model-00001-of-00002\.safetensors .* damaged or cut short"):
        load_hf(sharded)


def test_case_sglang_32279_tied_head_absent_from_the_file_equals_the_tied_reference(tmp_path: Path) -> None:
    policy = Policy(TIED, seed=5)
    save_hf(policy, tmp_path)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    again = load_hf(tmp_path)
    assert again.head_weight is again.embed and torch.equal(again.head_weight, policy.embed)


def test_tied_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    policy = Policy(TIED)
    save_hf(policy, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, HEAD: state[EMBED].clone()}, tmp_path / "model.safetensors")
    assert same(load_hf(tmp_path), policy)
    save_file({**state, HEAD: state[EMBED] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointLoadError, match=f"{HEAD} differs from {EMBED}"):
        load_hf(tmp_path)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    policy = Policy(TIED)
    state = to_hf_state(policy)
    norm = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(CheckpointLoadError, match=f"here: tensor {norm} missing"):
        load_hf_state(policy, {k: v for k, v in state.items() if k != norm}, "here")
    with pytest.raises(CheckpointLoadError, match=r"tensor model\.layers\.2\.x unknown to qwen3"):
        load_hf_state(policy, {**state, "model.layers.2.x": torch.ones(1)})
    with pytest.raises(CheckpointLoadError, match=r"q_norm\.weight has shape \(9,\), expected \(8,\)"):
        load_hf_state(policy, {**state, norm: torch.ones(9)})


def test_refused_state_leaves_the_weights_as_they_were() -> None:
    policy, other = Policy(TIED, seed=1), Policy(TIED, seed=2)
    state = to_hf_state(other)
    del state["model.norm.weight"]
    with pytest.raises(CheckpointLoadError):
        load_hf_state(policy, state)
    assert same(policy, Policy(TIED, seed=1))


def test_state_shares_no_memory_with_the_policy() -> None:
    policy = Policy(TIED)
    state = to_hf_state(policy)
    before = state[EMBED].clone()
    with torch.no_grad():
        policy.embed.add_(1)
    assert torch.equal(state[EMBED], before)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLoadError, match=r"config\.json is missing"):
        load_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_arithmetic_that_is_not_implemented_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        ModelConfig.from_hf({**TIED.to_hf(), **change})


@pytest.mark.parametrize("config", [TIED, UNTIED, MOE, msgspec.structs.replace(TIED, qk_norm=False)])
def test_config_json_round_trip(config: ModelConfig) -> None:
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
