"""A published version as a Hugging Face directory: what plain `transformers`, vLLM and a person open.

Every object is verified against the log's digest of the manifest before anything is written; a directory that exists
is refused, so that nothing is half overwritten.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import load_hf_state
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import fetch_weights
from odradek.actors.trainer.errors import CheckpointError
from odradek.streams.blobs import ObjectStore
from odradek.streams.events.weights import VersionPublished


async def save_version(store: ObjectStore, published: VersionPublished, directory: Path, tokenizer: Path) -> None:
    """Write config.json, model.safetensors and tokenizer.json to a new directory.

    Raises CheckpointError when the directory exists or an object is missing or damaged.
    """
    if await asyncio.to_thread(directory.exists):
        raise CheckpointError(f"{directory} exists: name a directory that does not")
    manifest, weights = await fetch_weights(store, published.manifest_key, published.manifest_sha256)
    policy = Policy(ModelConfig.from_hf(manifest.model))
    load_hf_state(policy, weights.state, manifest.name)
    await asyncio.to_thread(policy.save_hf, directory)
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
