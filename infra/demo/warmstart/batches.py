"""Padded batches of demonstrations, and the policy's forward on them.

The warm start trains through plain torch (padded rows, stock attention): about a quarter faster on a CPU than the
packed kernels, and nobody compares its log-probs with a sampler's. The weights are the same `Policy`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from odradek.actors.policy.model import Ops, Policy
from odradek.infra.demo.demonstrations.segments import Example
from odradek.kernels.moe.plain import mix_experts
from odradek.kernels.moe.routing import route

POOL = 320
"""Demonstrations sorted by length and cut into batches together. Fewer pads more, more makes batches alike in kind."""

PAD = 0
"""Id of `<pad>`, which no demonstration holds."""


@dataclass(frozen=True)
class Batch:
    """B rows of demonstrations padded to width W; weights are of each token as a target, 0 on padding."""

    ids_BW: Tensor
    weight_BW: Tensor
    agent_BW: Tensor
    tokens: int


def pool_batches(stream: Iterator[Example], tokens: int, max_length: int, rng: random.Random) -> list[Batch]:
    """The next `POOL` demonstrations as shuffled batches of about `tokens` tokens; longer ones are left out."""
    pool = [e for e in islice(stream, POOL) if len(e.token_ids) <= max_length]
    pool.sort(key=lambda e: len(e.token_ids))
    batches: list[Batch] = []
    rows: list[Example] = []
    for one in pool:
        rows.append(one)
        if len(rows) * len(one.token_ids) > tokens:
            batches.append(_pad(rows))
            rows = []
    if rows:
        batches.append(_pad(rows))
    rng.shuffle(batches)
    return batches


def _pad(rows: Sequence[Example]) -> Batch:
    width = max(len(e.token_ids) for e in rows)
    ids = torch.full((len(rows), width), PAD)
    weight, agent = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for i, e in enumerate(rows):
        n = len(e.token_ids)
        ids[i, :n] = torch.tensor(e.token_ids)
        weight[i, :n] = torch.tensor(e.context_weight)
        agent[i, :n] = torch.tensor(e.agent_mask)
    return Batch(ids, weight, agent, sum(len(e.token_ids) for e in rows))


def target_nll(policy: Policy, ids_BW: Tensor, ops: Ops | None = None) -> Tensor:
    """Negative log-likelihood `[B, W-1]` of each token after the first of its row."""
    rows, width = ids_BW.shape[0], ids_BW.shape[1] - 1

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.view(rows, width, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows * width, -1)

    positions = torch.arange(width).repeat(rows)
    hidden = policy.trunk(ids_BW[:, :-1].flatten(), positions, attend, ops or PLAIN)
    logits = F.linear(hidden, policy.head_weight)
    return F.cross_entropy(logits, ids_BW[:, 1:].flatten(), reduction="none").view(rows, width)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _experts(
    x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int, norm_topk: bool, replay: Tensor | None
) -> tuple[Tensor, Tensor]:
    weights, ids = route(F.linear(x, router), top_k, norm_topk, replay)
    return mix_experts(x, weights, ids, w13, w2, F.linear), ids.int()


PLAIN = Ops(F.linear, _rms_norm, _experts)


class RouterLoad:
    """Watches the routers in one forward. Rows where `real_N` is unset are padding and count nowhere."""

    def __init__(self, real_N: Tensor) -> None:
        self._real_N = real_N
        self.shares: list[Tensor] = []
        """`[E]` a sparse layer: the share of choices that each expert got."""
        self.loss = torch.zeros(())
        """Sum over layers of Switch's balancing term (Fedus et al. 2021): 1 a layer when all experts get the same."""

    @property
    def ops(self) -> Ops:
        return Ops(PLAIN.linear, PLAIN.rms_norm, self._watched)

    def _watched(
        self, x: Tensor, router: Tensor, w13: Tensor, w2: Tensor, top_k: int, norm_topk: bool, replay: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        y, ids = _experts(x, router, w13, w2, top_k, norm_topk, replay)
        chosen = torch.bincount(ids[self._real_N].flatten(), minlength=len(router))
        share = chosen / chosen.sum()
        likely = F.linear(x[self._real_N], router).softmax(-1).mean(0)
        self.shares.append(share)
        self.loss = self.loss + len(router) * (share * likely).sum()
        return y, ids
