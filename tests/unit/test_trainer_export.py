"""A published version leaves the store as a directory that plain `transformers` opens, with the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState
from odradek.actors.trainer.errors import CheckpointError
from odradek.actors.trainer.export import save_version
from odradek.actors.trainer.manifest import Origin, Place
from odradek.infra.cluster.policy import ASSETS
from odradek.kernels.logprob.api import row_logits
from odradek.streams.blobs import MemoryStore
from odradek.streams.events.weights import VersionPublished


async def test_a_saved_version_opens_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    store = MemoryStore()
    policy = Policy.load_hf(ASSETS)
    done = await Checkpoints(store, Place("i", "demo", "main-0")).publish(
        TrainerState.begin(policy, 0), Origin(parent=None), "test"
    )
    published = VersionPublished(policy="demo", version=0, manifest_key=done.key, manifest_sha256=done.sha256)
    await save_version(store, published, tmp_path / "v0", ASSETS / "tokenizer.json")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v0", dtype=torch.float32)
    tokens = torch.arange(1, 60) * 13 % 1000
    with torch.no_grad():
        theirs = model(tokens[None]).logits[0]
        starts = torch.tensor([0, len(tokens)], dtype=torch.int32)
        ours = row_logits(policy.forward_packed(tokens, torch.arange(len(tokens)), starts), policy.head_weight)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match="exists"):
        await save_version(store, published, tmp_path / "v0", ASSETS / "tokenizer.json")
