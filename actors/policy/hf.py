"""Hugging Face directories and tensor names.

Owns the mapping between our fused parameters and the names of Qwen3 / Qwen3-MoE / Llama checkpoints, and the reading
and writing of `config.json` + safetensors (one file, or shards with an index). Reading is strict: a missing shard, a
shard cut short, a tensor missing, left over or of another shape is refused by name before a model exists, so nothing
ever serves with random weights. The one absence that is fine is `lm_head.weight` of a tied model; if it is there it
must equal the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from odradek.actors.policy.directory import (
    CONFIG_FILE,
    EMBED,
    HEAD,
    INDEX_FILE,
    WEIGHTS_FILE,
    check_state,
    check_tied,
    mlp_prefixes,
    read_config,
    tensors,
)
from odradek.actors.policy.model import Policy

METADATA: Final = {"format": "pt"}
"""transformers refuses a safetensors file that does not name its framework."""


def to_hf_state(policy: Policy) -> dict[str, Tensor]:
    """The weights under Hugging Face names: contiguous copies on the CPU that share no memory with the policy."""
    c, out = policy.config, {}
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    state = {name: p.detach().cpu() for name, p in policy.named_parameters()}
    out[EMBED], out["model.norm.weight"] = state["embed"], state["final_norm"]
    for i in range(c.num_hidden_layers):
        p, b = f"model.layers.{i}", f"blocks.{i}"
        out[f"{p}.input_layernorm.weight"] = state[f"{b}.attn_norm"]
        out[f"{p}.post_attention_layernorm.weight"] = state[f"{b}.mlp_norm"]
        for name, part in zip("qkv", state[f"{b}.qkv"].split_with_sizes([q, kv, kv]), strict=True):
            out[f"{p}.self_attn.{name}_proj.weight"] = part
        out[f"{p}.self_attn.o_proj.weight"] = state[f"{b}.o"]
        if c.qk_norm:
            out |= {f"{p}.self_attn.{n}_norm.weight": state[f"{b}.{n}_norm"] for n in "qk"}
        w13, w2 = state[f"{b}.w13"], state[f"{b}.w2"]
        if c.num_experts:
            out[f"{p}.mlp.gate.weight"] = state[f"{b}.router"]
        else:
            w13, w2 = w13[None], w2[None]
        for m, pair, down in zip(mlp_prefixes(c, i), w13, w2, strict=True):
            out[f"{m}.gate_proj.weight"], out[f"{m}.up_proj.weight"] = pair.chunk(2)
            out[f"{m}.down_proj.weight"] = down
    if not c.tie_word_embeddings:
        out[HEAD] = state["lm_head"]
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in out.items()}


@torch.no_grad()
def load_hf_state(policy: Policy, state: Mapping[str, Tensor], source: str = "state") -> None:
    """Copy a complete Hugging Face state into `policy`; checks everything before it writes anything.

    `source` names where the state came from, for the message of the `CheckpointLoadError`.
    """
    c = policy.config
    check_state(c, {name: tuple(t.shape) for name, t in state.items()}, source)
    if c.tie_word_embeddings and HEAD in state:
        check_tied(torch.equal(state[HEAD], state[EMBED]), source)
    params = dict(policy.named_parameters())
    params["embed"].copy_(state[EMBED])
    params["final_norm"].copy_(state["model.norm.weight"])
    if not c.tie_word_embeddings:
        params["lm_head"].copy_(state[HEAD])
    for i in range(c.num_hidden_layers):
        p, b = f"model.layers.{i}", f"blocks.{i}"
        params[f"{b}.attn_norm"].copy_(state[f"{p}.input_layernorm.weight"])
        params[f"{b}.mlp_norm"].copy_(state[f"{p}.post_attention_layernorm.weight"])
        params[f"{b}.qkv"].copy_(torch.cat([state[f"{p}.self_attn.{n}_proj.weight"] for n in "qkv"]))
        params[f"{b}.o"].copy_(state[f"{p}.self_attn.o_proj.weight"])
        if c.qk_norm:
            for n in "qk":
                params[f"{b}.{n}_norm"].copy_(state[f"{p}.self_attn.{n}_norm.weight"])
        prefixes = mlp_prefixes(c, i)
        pairs = [torch.cat([state[f"{m}.gate_proj.weight"], state[f"{m}.up_proj.weight"]]) for m in prefixes]
        downs = [state[f"{m}.down_proj.weight"] for m in prefixes]
        params[f"{b}.w13"].copy_(torch.stack(pairs) if c.num_experts else pairs[0])
        params[f"{b}.w2"].copy_(torch.stack(downs) if c.num_experts else downs[0])
        if c.num_experts:
            params[f"{b}.router"].copy_(state[f"{p}.mlp.gate.weight"])


def write_config(config: dict[str, object], directory: Path) -> None:
    """`config.json` of a directory."""
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_hf(policy: Policy, directory: Path, max_shard_bytes: int | None = None) -> None:
    """Write the directory; with `max_shard_bytes`, as numbered shards and an index once it is exceeded."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(policy.config.to_hf(), directory)
    state = to_hf_state(policy)
    shards = list(_shards(state, max_shard_bytes))
    if len(shards) == 1:
        (directory / WEIGHTS_FILE).write_bytes(save(state, metadata=METADATA))
        return
    weight_map: dict[str, str] = {}
    for n, names in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        (directory / file).write_bytes(save({name: state[name] for name in names}, metadata=METADATA))
        weight_map |= dict.fromkeys(names, file)
    total = sum(t.nbytes for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(state: Mapping[str, Tensor], limit: int | None) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, t in state.items():
        if limit is not None and names and size + t.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += t.nbytes
    yield names


def load_hf(directory: Path) -> Policy:
    """Open a directory as float32 weights; raises `CheckpointLoadError` or `UnsupportedModelError`."""
    policy = Policy(read_config(directory), seed=None)
    load_hf_state(policy, dict(tensors(directory)), str(directory))
    return policy
