"""Random training batches and a tiny policy, for tests of the trainer and of what feeds it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.batch import TrainingBatch

TINY = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8, max_position_embeddings=128
)


def tiny_policy(seed: int = 0) -> Policy:
    """Two layers of width 32 on one thread."""
    torch.set_num_threads(1)
    return Policy(TINY, seed)


def random_batch(
    trained: Sequence[int], seed: int = 0, prompt: int = 4, vocabulary: int = TINY.vocab_size, version: int = 0
) -> TrainingBatch:
    """One sequence for each entry of `trained`: a prompt, then that many trained tokens and two untrained ones."""
    rng = np.random.default_rng(seed)
    lengths = [prompt + n + 2 for n in trained]
    total = sum(lengths)
    mask = np.concatenate([[False] * prompt + [True] * n + [False] * 2 for n in trained])
    return TrainingBatch(
        tokens=rng.integers(vocabulary, size=total, dtype=np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=np.where(mask, rng.normal(-4, 0.3, total), 0).astype(np.float32),
        advantages=np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
        versions=np.full(total, version, np.int32),
    )


def gradients(policy: Policy) -> dict[str, Tensor]:
    """A copy of every gradient, zeros where there is none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in policy.named_parameters()}


def weights(policy: Policy) -> dict[str, Tensor]:
    """A copy of every parameter."""
    return {name: p.detach().clone() for name, p in policy.named_parameters()}
