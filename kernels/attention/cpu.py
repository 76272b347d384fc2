"""Tiled attention on CPU: plain torch over the units of `units.py`.

For one block: m = max over all its keys of the scores, p = exp(score − m) tile by tile, and then, tile after tile in
ascending order, the sums Σ p and Σ p·v; out = Σ p·v / Σ p. The maximum is taken first and not carried along (as the GPU
path must): a maximum has no rounding, so the bits still depend only on the tiles, and no partial sum is ever rescaled.
Hidden keys get a score of −inf, weigh exactly 0 and leave every sum as it was; so it does not matter how many of them a
tile holds.
"""

import math
import threading
from typing import Any, cast

import torch

from odradek.kernels.attention.backward import causal_backward
from odradek.kernels.attention.layout import from_rows, live_rows, scaled, scores, to_rows
from odradek.kernels.attention.units import TILE, BlockPlan, plan_causal


class _Scratch(threading.local):
    """One buffer per thread for the tiles of a chunk: fresh memory for each gather costs page faults."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def gather(self, tiles: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`tiles[rows]` in the buffer; valid until the next call on this thread."""
        shape = (len(rows), *tiles.shape[1:])
        size = math.prod(shape)
        if self.buffer.dtype != tiles.dtype or self.buffer.numel() < size:
            # A buffer made inside inference mode could not be written outside it.
            with torch.inference_mode(False):
                self.buffer = torch.empty(size, dtype=tiles.dtype)
        return torch.index_select(tiles, 0, rows, out=self.buffer[:size].view(shape))


_scratch = _Scratch()


def _forward(
    q_H_Bk_R_D: torch.Tensor, k_tiles: torch.Tensor, v_tiles: torch.Tensor, plan: BlockPlan, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out [Hk, Bk + 1, r, D], log-sum-exp [Hk, Bk + 1, r, 1])`, r being the rows without padding."""
    wide, real = q_H_Bk_R_D.dtype, plan.block_size * group
    shape = (*q_H_Bk_R_D.shape[:2], real)
    top, total = q_H_Bk_R_D.new_full(shape, -math.inf), q_H_Bk_R_D.new_zeros(shape)
    out = q_H_Bk_R_D.new_zeros(*shape, q_H_Bk_R_D.shape[3])
    for chunk in plan.chunks:
        scored: list[torch.Tensor] = []
        for units in chunk:
            _, s = scores(q_H_Bk_R_D, _scratch.gather(k_tiles, units.tile_U).to(wide), units, real)
            highest = live_rows(s, units, real).amax(-1)
            top.scatter_reduce_(1, units.block_E[None, :, None].expand_as(highest), highest, "amax")
            scored.append(s)
        for units, s in zip(chunk, scored, strict=True):
            # The padding rows of s keep their raw scores; what they lead to is never read.
            weights = live_rows(s, units, real)
            weights.sub_(top.index_select(1, units.block_E)[..., None]).exp_()
            v_U_K_H_D = _scratch.gather(v_tiles, units.tile_U).to(wide)
            pv = s.new_empty(*s.shape[:3], v_tiles.shape[3])
            for head in range(len(s)):
                torch.bmm(s[head], v_U_K_H_D[:, :, head], out=pv[head])
            total.index_add_(1, units.block_E, weights.sum(-1))
            out.index_add_(1, units.block_E, live_rows(pv, units, real))
    return out.div_(total[..., None]), total.log_().add_(top)[..., None]


def attend_paged(
    q_B_Q_Hq_D: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: BlockPlan
) -> torch.Tensor:
    """See `attention.api`."""
    if not plan.blocks:
        return torch.zeros_like(q_B_Q_Hq_D)
    kv_heads = k_pages.shape[2]
    group = q_B_Q_Hq_D.shape[2] // kv_heads
    flat = q_B_Q_Hq_D.detach().flatten(0, 1)
    out, _ = _forward(to_rows(scaled(flat), plan, kv_heads), k_pages, v_pages, plan, group)
    rows = from_rows(out, plan, group).to(flat.dtype)
    if not plan.in_place:
        full = torch.zeros_like(flat)
        full[plan.source_rows[plan.real_rows]] = rows[plan.real_rows]
        rows = full
    return rows.view(q_B_Q_Hq_D.shape)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[int, ...]) -> torch.Tensor:
        if not len(q):
            ctx.bounds = None
            return torch.zeros_like(q)
        plan = plan_causal(bounds)
        kv_heads, width = k.shape[1:]
        group = q.shape[1] // kv_heads
        k_tiles, v_tiles = (x.index_select(0, plan.source_rows).view(-1, TILE, kv_heads, width) for x in (k, v))
        found = _forward(to_rows(scaled(q), plan, kv_heads), k_tiles, v_tiles, plan, group)
        out, lse = (from_rows(x, plan, group)[plan.real_rows] for x in found)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse[..., 0])
        ctx.bounds = bounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.bounds is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        return (*causal_backward(q, k, v, out, lse, grads[0], ctx.bounds), None)


def attend_causal(
    q_T_Hq_D: torch.Tensor, k_T_Hk_D: torch.Tensor, v_T_Hk_D: torch.Tensor, bounds: tuple[int, ...]
) -> torch.Tensor:
    """See `attention.api`; `bounds` is `seq_starts` as a tuple."""
    return cast(torch.Tensor, _Causal.apply(q_T_Hq_D, k_T_Hk_D, v_T_Hk_D, bounds))
