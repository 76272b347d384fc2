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
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.errors import CheckpointLoadError
from odradek.actors.policy.model import Policy

HEAD: Final = "lm_head.weight"
EMBED: Final = "model.embed_tokens.weight"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_METADATA: Final = {"format": "pt"}
"""transformers refuses a safetensors file that does not name its framework."""
NAMES_SHOWN: Final = 5
"""Tensor names listed in one error message: enough to see the pattern, not a page of it."""


def hf_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape; the head only when it is not tied."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    h, f = c.hidden_size, c.moe_intermediate_size if c.num_experts else c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBED: (c.vocab_size, h), "model.norm.weight": (h,)}
    for i in range(c.num_hidden_layers):
        p = f"model.layers.{i}"
        shapes |= {
            f"{p}.input_layernorm.weight": (h,),
            f"{p}.post_attention_layernorm.weight": (h,),
            f"{p}.self_attn.q_proj.weight": (q, h),
            f"{p}.self_attn.k_proj.weight": (kv, h),
            f"{p}.self_attn.v_proj.weight": (kv, h),
            f"{p}.self_attn.o_proj.weight": (h, q),
        }
        if c.qk_norm:
            shapes |= {f"{p}.self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
        if c.num_experts:
            shapes[f"{p}.mlp.gate.weight"] = (c.num_experts, h)
        for m in _mlp_prefixes(c, i):
            shapes |= {f"{m}.gate_proj.weight": (f, h), f"{m}.up_proj.weight": (f, h), f"{m}.down_proj.weight": (h, f)}
    if not c.tie_word_embeddings:
        shapes[HEAD] = (c.vocab_size, h)
    return shapes


def _mlp_prefixes(c: ModelConfig, layer: int) -> list[str]:
    base = f"model.layers.{layer}.mlp"
    return [f"{base}.experts.{e}" for e in range(c.num_experts)] if c.num_experts else [base]


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
        for m, pair, down in zip(_mlp_prefixes(c, i), w13, w2, strict=True):
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
    if c.tie_word_embeddings and HEAD in state and not torch.equal(state[HEAD], state[EMBED]):
        raise CheckpointLoadError(f"{source}: {HEAD} differs from {EMBED} although the configuration ties them")
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
        prefixes = _mlp_prefixes(c, i)
        pairs = [torch.cat([state[f"{m}.gate_proj.weight"], state[f"{m}.up_proj.weight"]]) for m in prefixes]
        downs = [state[f"{m}.down_proj.weight"] for m in prefixes]
        params[f"{b}.w13"].copy_(torch.stack(pairs) if c.num_experts else pairs[0])
        params[f"{b}.w2"].copy_(torch.stack(downs) if c.num_experts else downs[0])
        if c.num_experts:
            params[f"{b}.router"].copy_(state[f"{p}.mlp.gate.weight"])


def check_state(c: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse a set of tensors that is not exactly that of `c`, naming what is missing, left over or misshapen."""
    wanted = hf_shapes(c)
    missing = sorted(set(wanted) - set(found))
    extra = sorted(set(found) - set(wanted) - ({HEAD} if c.tie_word_embeddings else set()))
    if missing:
        raise CheckpointLoadError(f"{source}: {_some(missing)} missing; the checkpoint is incomplete, fetch it again")
    if extra:
        raise CheckpointLoadError(f"{source}: {_some(extra)} unknown to {c.model_type}; is config.json of this model?")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise CheckpointLoadError(f"{source}: {name} has shape {tuple(found[name])}, expected {shape}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ("tensors " if len(names) > 1 else "tensor ") + ", ".join(names[:NAMES_SHOWN]) + more


def save_hf(policy: Policy, directory: Path, max_shard_bytes: int | None = None) -> None:
    """Write the directory; with `max_shard_bytes`, as numbered shards and an index once it is exceeded."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps(policy.config.to_hf(), indent=2, sort_keys=True)
    (directory / "config.json").write_text(config + "\n")
    state = to_hf_state(policy)
    shards = list(_shards(state, max_shard_bytes))
    if len(shards) == 1:
        (directory / WEIGHTS_FILE).write_bytes(save(state, metadata=_METADATA))
        return
    weight_map: dict[str, str] = {}
    for n, names in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        (directory / file).write_bytes(save({name: state[name] for name in names}, metadata=_METADATA))
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
    config = ModelConfig.from_hf(_json(directory / "config.json"))
    state: dict[str, Tensor] = {}
    for file, names in _files(directory).items():
        state |= _read_shard(directory / file, names)
    policy = Policy(config)
    load_hf_state(policy, state, str(directory))
    return policy


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointLoadError(f"{path} is missing; not a Hugging Face checkpoint directory") from None
    except ValueError as e:
        raise CheckpointLoadError(f"{path} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise CheckpointLoadError(f"{path} holds {type(raw).__name__}, expected an object")
    return raw


def _files(directory: Path) -> dict[str, list[str] | None]:
    """The shard files to read, each with the tensors that the index promises (None: whatever is inside)."""
    if not (directory / INDEX_FILE).exists():
        return {WEIGHTS_FILE: None}
    files: dict[str, list[str] | None] = {}
    for name, file in _json(directory / INDEX_FILE)["weight_map"].items():
        listed = files.setdefault(file, [])
        assert listed is not None
        listed.append(name)
    return files


def _read_shard(path: Path, promised: list[str] | None) -> dict[str, Tensor]:
    if not path.exists():
        raise CheckpointLoadError(f"{path} is missing; the checkpoint is incomplete, fetch it again")
    try:
        with safe_open(path, framework="pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no iterator on safe_open)
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointLoadError(f"{path} ({path.stat().st_size} bytes) is damaged or cut short: {e}") from e
    lost = sorted(set(promised or ()) - set(tensors))
    if lost:
        raise CheckpointLoadError(f"{path}: {_some(lost)} promised by {INDEX_FILE} but not inside")
    return tensors
