"""A policy directory as it lies on disk, checked without loading a weight and without importing torch.

`config.json`, safetensors (one file, or shards with an index) and `tokenizer.json`. `inspect` promises: a directory
that passes has every tensor of its configuration, each whole, of the right shape and a floating dtype, a tokenizer that
gives texts back byte for byte and has the template's special tokens, and a vocabulary that fits the embedding. Whatever
is wrong is named with its file; nothing has been started by then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors import SafetensorError, safe_open

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.errors import CheckpointLoadError, PolicyError
from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer

HEAD: Final = "lm_head.weight"
EMBED: Final = "model.embed_tokens.weight"
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
NAMES_SHOWN: Final = 5
"""Tensor names listed in one error message: enough to see the pattern, not a page of it."""

DTYPES: Final = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of stored weights by safetensors' names. Others are quantised or no weights."""

WEIGHT_BYTES: Final = 4
"""Bytes of one weight as computed and published: float32."""

SPARE_ROWS: Final = 1024
"""Rows of the embedding that no token needs: checkpoints round up their vocabulary. More means another model's
tokenizer."""

PROBES: Final = ("  e\u0301 \u2126\r\n\t\u4e2d \U0001f600", "<end></call>", " x", "\x00\x7f\udcff", "0123  45")
"""Texts that a tokenizer changes which normalises, strips, adds a space or lacks bytes."""


class PolicyDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole directory holds."""

    directory: str
    config: ModelConfig
    dtype: str
    """Of the stored weights; several are joined by `+`."""
    parameters: int
    weight_bytes: int
    tokenizer: str
    """Digest of the tokenizer's file, as sessions name it."""
    tokens: int
    """Ids that the tokenizer knows."""


def inspect(directory: Path) -> PolicyDirectory:
    """Check everything but the values of the weights. Raises `PolicyError` naming the first thing that is wrong."""
    config = read_config(directory)
    found = dict(_headers(directory))
    check_state(config, {name: shape for name, (shape, _) in found.items()}, str(directory))
    if config.tie_word_embeddings and HEAD in found:
        stored = {name: tensor for name, tensor in tensors(directory) if name in (HEAD, EMBED)}
        check_tied(stored[HEAD].equal(stored[EMBED]), str(directory))
    kinds = {kind for _, kind in found.values()}
    if wrong := sorted(kinds - set(DTYPES)):
        raise CheckpointLoadError(
            f"{directory}: weights are stored as {', '.join(wrong)}, expected {', '.join(DTYPES)}"
        )
    tokenizer = read_tokenizer(directory, config)
    files = {directory / file for file in shard_files(directory)}
    return PolicyDirectory(
        directory=str(directory),
        config=config,
        dtype="+".join(sorted(DTYPES[kind] for kind in kinds)),
        parameters=parameters_of(config),
        weight_bytes=sum(file.stat().st_size for file in files),
        tokenizer=tokenizer.digest,
        tokens=tokenizer.vocab_size,
    )


def read_config(directory: Path) -> ModelConfig:
    """The shape in `config.json`."""
    path = directory / CONFIG_FILE
    try:
        return ModelConfig.from_hf(read_json(path))
    except PolicyError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def read_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer, if it can serve our template with this model."""
    tokenizer = Tokenizer.from_file(directory / TOKENIZER_FILE)
    XmlTemplate(tokenizer)
    for probe in PROBES:
        ids = tokenizer.encode_text(probe)
        if tokenizer.decode_bytes(ids) != probe.encode("utf-8", "surrogateescape"):
            raise CheckpointLoadError(f"{directory / TOKENIZER_FILE} does not give {probe!r} back as it was")
    spare = config.vocab_size - tokenizer.vocab_size
    if not 0 <= spare <= SPARE_ROWS:
        raise CheckpointLoadError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} rows; "
            "they are not of one model"
        )
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointLoadError(f"{path} is missing; not a Hugging Face checkpoint directory") from None
    except OSError as error:
        raise CheckpointLoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointLoadError(f"{path} holds {type(raw).__name__}, expected an object")
    return raw


def shard_files(directory: Path) -> dict[str, list[str] | None]:
    """The weight files, each with the tensors that the index promises (None: whatever is inside)."""
    if not (directory / INDEX_FILE).exists():
        return {WEIGHTS_FILE: None}
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointLoadError(f"{directory / INDEX_FILE} has no weight_map")
    files: dict[str, list[str] | None] = {}
    for name, file in weight_map.items():
        if Path(str(file)).name != file:
            raise CheckpointLoadError(f"{directory / INDEX_FILE}: {name} is in {file!r}, expected a file beside it")
        listed = files.setdefault(file, [])
        assert listed is not None
        listed.append(name)
    return files


def open_shard(path: Path, framework: str) -> Any:
    """safetensors' reader of a file; a file that is missing or not as long as its header says is refused by name."""
    if not path.exists():
        raise CheckpointLoadError(f"{path} is missing; the checkpoint is incomplete, fetch it again")
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointLoadError(
            f"{path} ({path.stat().st_size} bytes) is damaged or cut short: {error}; fetch it again"
        ) from error


def check_promised(path: Path, promised: list[str] | None, found: Mapping[str, Any]) -> None:
    """Refuse a shard that lacks what the index says is in it."""
    lost = sorted(set(promised or ()) - set(found))
    if lost:
        raise CheckpointLoadError(f"{path}: {_some(lost)} promised by {INDEX_FILE} but not inside")


def tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Every stored tensor, one at a time; importing torch begins here."""
    for file, promised in shard_files(directory).items():
        yield from tensors_of(directory / file, promised)


def tensors_of(path: Path, promised: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Those of one file, which has at least the promised ones."""
    with open_shard(path, "pt") as shard:
        names = list(shard.keys())
        check_promised(path, promised, dict.fromkeys(names))
        for name in names:
            yield name, shard.get_tensor(name)


def check_tied(equal: bool, source: str) -> None:
    """Refuse a head that is stored beside a tied embedding and is another one."""
    if not equal:
        raise CheckpointLoadError(f"{source}: {HEAD} differs from {EMBED} although the configuration ties them")


def _headers(directory: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Each stored tensor's name, shape and dtype."""
    for file, promised in shard_files(directory).items():
        path = directory / file
        with open_shard(path, "np") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (no iterator)
            check_promised(path, promised, slices)
            for name, one in slices.items():
                yield name, (tuple(one.get_shape()), one.get_dtype())


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
        for m in mlp_prefixes(c, i):
            shapes |= {f"{m}.gate_proj.weight": (f, h), f"{m}.up_proj.weight": (f, h), f"{m}.down_proj.weight": (h, f)}
    if not c.tie_word_embeddings:
        shapes[HEAD] = (c.vocab_size, h)
    return shapes


def parameters_of(c: ModelConfig) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(prod(shape) for shape in hf_shapes(c).values())


def mlp_prefixes(c: ModelConfig, layer: int) -> list[str]:
    """Names of a layer's feed-forwards: one, or one an expert."""
    base = f"model.layers.{layer}.mlp"
    return [f"{base}.experts.{e}" for e in range(c.num_experts)] if c.num_experts else [base]


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
