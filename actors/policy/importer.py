"""A policy directory out of a Hugging Face checkpoint: our markers added to its tokenizer, and rows for them.

Guarantees:
- tokens of the source keep their ids, and their rows keep their bits: on text the model is the one it was;
- the new tokenizer gives any text back byte for byte: what normalises, strips or adds a space is taken out, and bytes
  that no token spelled get one;
- a marker's row is the mean of the rows of the tokens that spell its name (so it begins near them), a byte's the mean
  of the other bytes' rows. Nothing is random: the same source gives the same bytes;
- the result is whole or not there, and passes `directory.inspect`.
It refuses what `ModelConfig` refuses, tokenizers that are no byte-level BPE, and a marker that is an ordinary token.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.directory import (
    CONFIG_FILE,
    EMBED,
    HEAD,
    INDEX_FILE,
    TOKENIZER_FILE,
    PolicyDirectory,
    check_state,
    check_tied,
    inspect,
    read_config,
    read_json,
    shard_files,
    tensors_of,
)
from odradek.actors.policy.errors import CheckpointLoadError, PolicyError
from odradek.actors.policy.hf import METADATA, load_hf, write_config
from odradek.actors.policy.template import SPECIALS, XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer, TokenizerError, byte_alphabet

COMPUTED: Final = "rotary_emb.inv_freq"
"""Older checkpoints store what follows from the configuration."""

LARGEST_DIFFERENCE: Final = 1e-3
"""Between our logits and transformers', relative to the largest logit. Both compute in float32 and differ by rounding
(1e-5 seen with 30 layers); another arithmetic differs by far more."""

SAMPLE: Final = 'Fix the function in total.py:\n\ndef total(values):\n    return sum(values) - len("values")\n'
"""The text that both are compared on."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Our logits against plain transformers' on a short prompt."""

    transformers: str
    """Its version; empty where it is not installed, and then nothing was compared."""
    tokens: int = 0
    largest_difference: float = 0.0
    largest_logit: float = 0.0


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import made."""

    made: PolicyDirectory
    markers: int
    """Special tokens that were added; the others were there."""
    byte_tokens: int
    compared: Compared


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A token that the source has no row for, and the tokens whose rows it begins as the mean of."""

    number: int
    like: list[int]
    marker: bool


def import_hf(source: Path, out: Path, compare: bool = True) -> Imported:
    """Write the policy directory `out`; raises `PolicyError` and leaves nothing there."""
    if out.exists():
        raise CheckpointLoadError(f"{out} exists: name a directory that does not")
    config = read_config(source)
    data, fresh = adapted_tokenizer(source / TOKENIZER_FILE, config.vocab_size)
    rows = max([config.vocab_size, *(token.number + 1 for token in fresh)])
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        (partial / TOKENIZER_FILE).write_text(data, encoding="utf-8")
        _write_weights(source, partial, config, fresh, rows)
        _write_config(source, partial, rows)
        made = inspect(partial)
        compared = compare_with_transformers(partial) if compare else Compared(transformers="")
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    markers = sum(token.marker for token in fresh)
    made = msgspec.structs.replace(made, directory=str(out))
    return Imported(made=made, markers=markers, byte_tokens=len(fresh) - markers, compared=compared)


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def adapted_tokenizer(path: Path, rows: int) -> tuple[str, list[_Fresh]]:
    """The text of a tokenizer file with our markers, and the tokens that are new; `rows` are the source's."""
    raw = read_json(path)
    model = raw.get("model") or {}
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        raise TokenizerError(f"{path}: the model is {model.get('type')}, expected a byte-level BPE")
    if not any(piece["type"] == "ByteLevel" for piece in _pieces(raw.get("pre_tokenizer"))):
        raise TokenizerError(f"{path}: the pre-tokenizer is not byte-level; this BPE can't spell every byte")
    raw |= {"normalizer": None, "truncation": None, "padding": None}
    model |= {"dropout": None}
    for piece in _pieces(raw["pre_tokenizer"]):
        if "add_prefix_space" in piece:
            piece["add_prefix_space"] = False
    for token in raw["added_tokens"]:
        token |= {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    number = 1 + max([*vocabulary.values(), *(token["id"] for token in raw["added_tokens"])])
    if number > rows:
        raise TokenizerError(f"{path} has {number} tokens, the embedding {rows} rows; they are not of one model")
    alphabet = byte_alphabet()
    known = [vocabulary[char] for char in alphabet if char in vocabulary]
    fresh = [_Fresh(number + at, known, False) for at, char in enumerate(c for c in alphabet if c not in vocabulary)]
    vocabulary |= dict(
        zip((char for char in alphabet if char not in vocabulary), (t.number for t in fresh), strict=True)
    )
    spelling = Tokenizer(json.dumps(raw), str(path))
    for name in _missing_markers(path, raw, vocabulary):
        fresh.append(_Fresh(number + len(fresh), spelling.encode_text(name), True))
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
        raw["added_tokens"].append({"id": fresh[-1].number, "content": name} | flags)
    return json.dumps(raw, ensure_ascii=False), fresh


def _pieces(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if not pre_tokenizer:
        return []
    return list(pre_tokenizer["pretokenizers"]) if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]


def _missing_markers(path: Path, raw: dict[str, Any], vocabulary: Mapping[str, int]) -> list[str]:
    """Markers to be added, in order; one that is there as an added token is made special."""
    added = {token["content"]: token for token in raw["added_tokens"]}
    missing = []
    for name in SPECIALS:
        if name in added:
            added[name]["special"] = True
        elif name in vocabulary:
            raise TokenizerError(f"{path}: {name!r} is an ordinary token there: a text could forge it")
        else:
            missing.append(name)
    return missing


# -- weights and configuration -----------------------------------------------------------------------------------------


def _write_weights(source: Path, out: Path, config: ModelConfig, fresh: list[_Fresh], rows: int) -> None:
    """Shard by shard, so that one shard and nothing more is in memory."""
    found: dict[str, tuple[int, ...]] = {}
    heads: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    for file, promised in shard_files(source).items():
        state = {name: t for name, t in tensors_of(source / file, promised) if not name.endswith(COMPUTED)}
        found |= {name: tuple(t.shape) for name, t in state.items()}
        heads |= {name: t for name, t in state.items() if name in (EMBED, HEAD)}
        if config.tie_word_embeddings:
            state.pop(HEAD, None)
        state |= {name: _with_rows(t, fresh, rows) for name, t in state.items() if name in (EMBED, HEAD)}
        if state:
            save_file(state, out / file, metadata=METADATA)
        weight_map |= dict.fromkeys(state, file)
    check_state(config, found, str(source))
    if config.tie_word_embeddings and HEAD in heads:
        check_tied(torch.equal(heads[HEAD], heads[EMBED]), str(source))
    if (source / INDEX_FILE).exists():
        total = sum((out / file).stat().st_size for file in set(weight_map.values()))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _with_rows(weight: Tensor, fresh: list[_Fresh], rows: int) -> Tensor:
    grown = weight.new_zeros(max(rows, len(weight)), weight.shape[1])
    grown[: len(weight)] = weight
    for token in fresh:
        grown[token.number] = weight[[at for at in token.like if at < len(weight)]].float().mean(0).to(weight.dtype)
    return grown


def _write_config(source: Path, out: Path, rows: int) -> None:
    tokenizer = Tokenizer.from_file(out / TOKENIZER_FILE)
    end, pad = tokenizer.special_id("<end>"), tokenizer.special_id("<pad>")
    raw = read_json(source / CONFIG_FILE)
    write_config(raw | {"vocab_size": rows, "bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}, out)
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (out / "tokenizer_config.json").write_text(json.dumps(plain, indent=2) + "\n")


# -- proof -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def compare_with_transformers(directory: Path) -> Compared:
    """Open the directory with plain transformers and with our decoder; raises where their logits differ."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return Compared(transformers="")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = Tokenizer.from_file(directory / TOKENIZER_FILE)
    ids = torch.tensor(XmlTemplate(tokenizer).open(SAMPLE))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = theirs(ids[None]).logits[0]
    del theirs
    policy = load_hf(directory)
    hidden = policy.forward_packed(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
    logits = hidden @ policy.head_weight.T
    difference, largest = float((logits - expected).abs().max()), float(expected.abs().max())
    if not difference <= LARGEST_DIFFERENCE * largest:
        raise PolicyError(
            f"{directory}: our logits differ from those of transformers {transformers.__version__} by {difference:.3g} "
            f"(largest logit {largest:.3g}); this decoder does not compute that model"
        )
    return Compared(
        transformers=transformers.__version__,
        tokens=len(ids),
        largest_difference=difference,
        largest_logit=largest,
    )
