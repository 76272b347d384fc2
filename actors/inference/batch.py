"""One forward call of an engine step: the new tokens of some sequences, packed, computed, booked.

Owns the tensors that belong to pages (keys, values, routed experts) and the block table, and nothing of who runs. The
sequences of a call share one weight version. Rows may be of unequal length; the model computes no padding outside the
attention.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odradek.actors.inference.pages import PAGE_SIZE
from odradek.actors.inference.scheduler import Sequence
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.kv import PagedKV
from odradek.actors.policy.model import Policy, Routing

Work = SequenceOf[tuple[Sequence, int]]
"""(sequence, number of its tokens to compute now)"""


class PagedBatch:
    """Keys, values and routed experts of `num_pages` pages, and one block-table row a running slot."""

    def __init__(self, config: ModelConfig, num_pages: int, slots: int) -> None:
        self._kv = PagedKV(config, num_pages)
        context_pages = -(-config.max_position_embeddings // PAGE_SIZE)
        self._table: npt.NDArray[np.int32] = np.zeros((slots, context_pages), np.int32)
        self._experts: npt.NDArray[np.int16] | None = None
        if config.num_experts:
            shape = (num_pages * PAGE_SIZE, config.num_hidden_layers, config.num_experts_per_tok)
            self._experts = np.zeros(shape, np.int16)

    def clear(self, pages: list[int]) -> None:
        """Zero pages whose old content is not finite."""
        for tensor in (*self._kv.k, *self._kv.v):
            tensor[pages] = 0

    @torch.inference_mode()
    def forward(self, policy: Policy, work: Work) -> Tensor:
        """Compute the new tokens (pages must be reserved); returns the hidden state of each row's last, `[B, H]`."""
        counts_B = np.array([n for _, n in work], np.int64)
        starts_B = np.array([s.held.computed for s, _ in work], np.int64)
        width = int(counts_B.max())
        tokens_B_Q = np.zeros((len(work), width), np.int64)
        for i, (s, n) in enumerate(work):
            done = s.held.computed
            tokens_B_Q[i, :n] = s.tokens[done : done + n]
            self._table[s.slot, : len(s.held.pages)] = s.held.pages
        positions_B_Q = starts_B[:, None] + np.minimum(np.arange(width), counts_B[:, None] - 1)
        table_B_M = self._table[[s.slot for s, _ in work], : -(-int((starts_B + counts_B).max()) // PAGE_SIZE)]
        routing = None if self._experts is None else Routing()
        hidden_B_Q_H = policy.forward_paged(
            torch.from_numpy(tokens_B_Q),
            torch.from_numpy(positions_B_Q),
            torch.from_numpy(counts_B),
            self._kv,
            torch.from_numpy(table_B_M),
            routing,
        )
        if self._experts is not None and routing is not None:
            keep = np.arange(width) < counts_B[:, None]
            page_B_Q = np.take_along_axis(table_B_M, positions_B_Q // PAGE_SIZE, 1).astype(np.int64)
            slots_N = (page_B_Q * PAGE_SIZE + positions_B_Q % PAGE_SIZE)[keep]
            self._experts[slots_N] = torch.stack(routing.chosen, 1).numpy()
        if width == 1:
            return hidden_B_Q_H[:, 0]
        return hidden_B_Q_H[torch.arange(len(work)), torch.from_numpy(counts_B) - 1]

    def routed_experts(self, s: Sequence) -> bytes:
        """int16 `[computed tokens, layers, top_k]` of a sequence; empty for a dense model."""
        if self._experts is None or not s.held.computed:
            return b""
        position_N = np.arange(s.held.computed)
        page_N = np.array(s.held.pages, np.int64)[position_N // PAGE_SIZE]
        chosen: bytes = self._experts[page_N * PAGE_SIZE + position_N % PAGE_SIZE].astype("<i2").tobytes()
        return chosen
