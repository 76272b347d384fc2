"""Paged key/value memory of the sampling engine: the tensors only.

One `PagedKV` holds, for each layer, `num_pages` pages of 64 tokens. Which page belongs to which session, reference
counts and prefix reuse are the engine's business; this module only writes new keys and values where a block table
says. Page p, slot s of a row's table holds absolute position `64 * index + s`, so that the attention kernel's 64-key
tiles are the pages: the tiles of a decode step are those of the causal training forward.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from odradek.actors.policy.config import ModelConfig

PAGE_SIZE: Final = 64
"""Tokens a page. Fixed by the attention kernel's key tile: another size would change the numbers."""


class PagedKV:
    """Key and value pages of every layer, `[num_pages, 64, kv_heads, head_dim]` each."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_pages, PAGE_SIZE, config.num_key_value_heads, config.head_dim)
        self.num_pages = num_pages
        # Zeros, not empty: attention masks unwritten slots, but 0 * NaN from stale memory would still be NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k`, `v` `[N, kv_heads, head_dim]` at flat `slots` `[N]` (page * 64 + offset in the page)."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)
