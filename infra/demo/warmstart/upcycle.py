"""Sparse upcycling: a mixture of experts that begins as a dense policy (Komatsuzaki et al. 2022, arXiv 2212.05055).

Guarantee: `upcycled` computes what the dense policy computes, up to rounding: each expert begins as a copy of the dense
feed-forward and the weights of the chosen ones sum to 1 (He et al. 2024, arXiv 2410.07524, on why they must). Experts
part in the training that follows, because the routers send them different tokens.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from odradek.actors.policy.errors import UnsupportedModelError
from odradek.actors.policy.model import Policy

CHOSEN: Final = 2
"""Experts that a token goes to. One would leave the router without a gradient, as its weight is always 1; each more
costs another feed-forward."""

ROUTER_STD: Final = 0.02
"""Spread of a router's first weights. Its input has a norm near sqrt(width), so the first scores differ by about 0.2:
larger prefers some experts before any has learnt, and at 0 all tokens go to the first two."""


@torch.no_grad()
def upcycled(dense: Policy, experts: int, seed: int) -> Policy:
    """`dense` with each feed-forward copied into `experts` experts behind a new router."""
    c = dense.config
    if c.num_experts:
        raise UnsupportedModelError(f"upcycling begins with a dense policy, this one has {c.num_experts} experts")
    config = msgspec.structs.replace(
        c,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        moe_intermediate_size=c.intermediate_size,
        norm_topk_prob=True,
    )
    policy = Policy(config, seed)
    generator = torch.Generator().manual_seed(seed)
    source = dict(dense.named_parameters())
    for name, p in policy.named_parameters():
        if name.endswith(".router"):
            p.normal_(0, ROUTER_STD, generator=generator)
        else:
            p.copy_(source[name])  # an expert's dimension in front is filled by broadcasting
    return policy
