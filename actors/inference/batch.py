"""One forward pass of an engine step: the new tokens of some sequences, under one weight version.

Owns the tensors that belong to pages (keys, values, routed experts) and the block table, and nothing of who runs.
All rows share one pass through the trunk, whatever they bring: what a step costs is mostly the number of calls, not of
rows. Only the attention is called once a *part*: rows that bring one token, a few, or a chunk are each padded to their
own width, since the kernel lays out whole blocks of queries. By the kernels' promise neither choice touches a bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from odradek.actors.inference.pages import PAGE_SIZE
from odradek.actors.inference.scheduler import Sequence
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.kv import PagedKV
from odradek.actors.policy.model import Policy, Routing
from odradek.kernels.attention.api import attend_paged, plan_paged

PART_WIDTHS: Final = (1, 16)
"""Most tokens a row of the first parts brings; the rest is one more part. These are the attention kernel's block sizes:
other borders pad more; fewer parts pad short rows to the longest one's block, more make more calls."""

Work = SequenceOf[tuple[Sequence, int]]
"""(sequence, number of its tokens to compute now)"""


def parts_of(work: Work) -> list[Work]:
    """`work` cut by the number of tokens a row brings; empty parts left out."""
    parts: list[list[tuple[Sequence, int]]] = [[] for _ in (*PART_WIDTHS, None)]
    for row in work:
        parts[bisect_left(PART_WIDTHS, row[1])].append(row)
    return [part for part in parts if part]


class _Part:
    """Some rows of a pass, flat for the trunk and rectangular for the attention."""

    def __init__(self, work: Work, table: npt.NDArray[np.int32]) -> None:
        counts_B = np.array([n for _, n in work], np.int64)
        starts_B = np.array([s.held.computed for s, _ in work], np.int64)
        self.rows, self.width = len(work), int(counts_B.max())
        within_Q = np.arange(self.width)
        positions_B_Q = starts_B[:, None] + np.minimum(within_Q, counts_B[:, None] - 1)
        keep_B_Q = within_Q < counts_B[:, None]
        table_B_M = table[[s.slot for s, _ in work], : -(-int((starts_B + counts_B).max()) // PAGE_SIZE)]
        page_B_Q = np.take_along_axis(table_B_M, positions_B_Q // PAGE_SIZE, 1).astype(np.int64)
        self.positions_N: npt.NDArray[np.int64] = positions_B_Q[keep_B_Q]
        self.slots_N: npt.NDArray[np.int64] = (page_B_Q * PAGE_SIZE + positions_B_Q % PAGE_SIZE)[keep_B_Q]
        self.last_B: npt.NDArray[np.int64] = np.cumsum(counts_B) - 1
        self._keep_N = None if keep_B_Q.all() else torch.from_numpy(np.flatnonzero(keep_B_Q))
        self._table = torch.from_numpy(table_B_M)
        self._q_positions = torch.from_numpy(positions_B_Q.astype(np.int32))
        self._q_len = torch.from_numpy(counts_B.astype(np.int32))
        self._plan = plan_paged(self._table, self._q_positions, self._q_len)

    def attend(self, q_N: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """Attention of the part's rows `[N, heads, D]`; their keys and values are in the pages already."""
        padded = q_N
        if self._keep_N is not None:
            padded = q_N.new_zeros(self.rows * self.width, *q_N.shape[1:]).index_copy_(0, self._keep_N, q_N)
        padded = padded.view(self.rows, self.width, *q_N.shape[1:])
        out = attend_paged(padded, k_pages, v_pages, self._table, self._q_positions, self._q_len, self._plan)
        flat = out.flatten(0, 1)
        return flat if self._keep_N is None else flat[self._keep_N]


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
    def forward(self, policy: Policy, parts: SequenceOf[Work]) -> Tensor:
        """Compute the new tokens (pages must be reserved); returns the hidden state of each row's last one, `[B, H]`,
        rows in the order of the parts."""
        tokens: list[int] = []
        for s, n in (row for part in parts for row in part):
            done = s.held.computed
            tokens += s.tokens[done : done + n]
            self._table[s.slot, : len(s.held.pages)] = s.held.pages
        laid_out = [_Part(work, self._table) for work in parts]
        slots_N = np.concatenate([part.slots_N for part in laid_out])
        slots = torch.from_numpy(slots_N)
        sizes = [len(part.slots_N) for part in laid_out]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._kv.write(layer, slots, k, v)
            k_pages, v_pages = self._kv.k[layer], self._kv.v[layer]
            rows = [p.attend(q_N, k_pages, v_pages) for p, q_N in zip(laid_out, q.split_with_sizes(sizes), strict=True)]
            return torch.cat(rows) if len(rows) > 1 else rows[0]

        positions = torch.from_numpy(np.concatenate([part.positions_N for part in laid_out]))
        routing = None if self._experts is None else Routing()
        hidden_N_H = policy.trunk(torch.tensor(tokens), positions, attend, routing=routing)
        if self._experts is not None and routing is not None:
            self._experts[slots_N] = torch.stack(routing.chosen, 1).numpy()
        starts = np.cumsum([0, *sizes[:-1]])
        last_B = np.concatenate([start + part.last_B for start, part in zip(starts, laid_out, strict=True)])
        return hidden_N_H if len(last_B) == len(hidden_N_H) else hidden_N_H[torch.from_numpy(last_B)]

    def routed_experts(self, s: Sequence) -> bytes:
        """int16 `[computed tokens, layers, top_k]` of a sequence; empty for a dense model."""
        if self._experts is None or not s.held.computed:
            return b""
        position_N = np.arange(s.held.computed)
        page_N = np.array(s.held.pages, np.int64)[position_N // PAGE_SIZE]
        chosen: bytes = self._experts[page_N * PAGE_SIZE + position_N % PAGE_SIZE].astype("<i2").tobytes()
        return chosen
