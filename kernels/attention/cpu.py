"""Tiled attention on CPU: plain torch over the units of `units.py`.

For one block: m = max over all its keys of the scores, p = exp(score − m) tile by tile, and then, tile after tile in
ascending order, the sums Σ p and Σ p·v; out = Σ p·v / Σ p. The maximum is taken first and not carried along (as the GPU
path must): a maximum has no rounding, so the bits still depend only on the tiles, and no partial sum is ever rescaled.
Hidden keys get a score of −inf, weigh exactly 0 and leave every sum as it was; so it does not matter how many of them a
tile holds.

Backward computes scores and weights again, unit by unit: with delta = Σ_D grad·out,
ds = p·(grad·vᵀ − delta), dq = ds·k, dk = dsᵀ·q, dv = pᵀ·grad. No promise on its bits.
"""

import math
import threading
from typing import Any, cast

import torch

from odradek.kernels.attention.units import ROW_TILE, TILE, BlockPlan, Chunk, PagedPlan, plan_units


class _Scratch(threading.local):
    """One buffer per thread for the tiles of a chunk: fresh memory for each gather costs more in page faults than the
    copy itself (seen: half of a decode step)."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0)

    def gather(self, tiles: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`tiles[rows]` in the buffer; valid until the next call on this thread."""
        shape = (len(rows), *tiles.shape[1:])
        size = math.prod(shape)
        if self.buffer.dtype != tiles.dtype or self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=tiles.dtype)
        out = self.buffer[:size].view(shape)
        return torch.index_select(tiles, 0, rows, out=out)


_scratch = _Scratch()


def _scores(
    q_Bk_H_R_D: torch.Tensor, k_U_K_H_D: torch.Tensor, chunk: Chunk, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(queries, scores)` of a chunk's units: [H, U, R, D] and [H, U, R, K], hidden keys at −inf."""
    heads, rows = q_Bk_H_R_D.shape[1:3]
    q_H_U_R_D = q_Bk_H_R_D[chunk.block0 : chunk.block1].transpose(0, 1).index_select(1, chunk.block_U)
    s_H_U_R_K = q_H_U_R_D.new_empty(heads, len(chunk.block_U), rows, TILE)
    for head in range(heads):
        torch.bmm(q_H_U_R_D[head], k_U_K_H_D[:, :, head].transpose(1, 2), out=s_H_U_R_K[head])
    hidden_U_Q_K = chunk.hidden_U_Q_K
    if len(hidden_U_Q_K):
        hidden_U_R_K = hidden_U_Q_K.repeat_interleave(group, 1) if group > 1 else hidden_U_Q_K
        s_H_U_R_K[:, chunk.first_masked :, : chunk.queries * group].masked_fill_(hidden_U_R_K, -math.inf)
    return q_H_U_R_D, s_H_U_R_K


def _forward_chunk(
    q_Bk_H_R_D: torch.Tensor, k_tiles: torch.Tensor, v_tiles: torch.Tensor, chunk: Chunk, group: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(out [H, Bk, r, D], max, sum [H, Bk, r])` of a chunk's blocks, r being the rows without padding."""
    wide = q_Bk_H_R_D.dtype
    _, s = _scores(q_Bk_H_R_D, _scratch.gather(k_tiles, chunk.tile_U).to(wide), chunk, group)
    heads, units, rows, _ = s.shape
    blocks, real = chunk.block1 - chunk.block0, chunk.queries * group
    # The padding rows of s keep their raw scores; what they lead to is never read.
    live = s[:, :, :real]
    top = s.new_full((heads, blocks, real), -math.inf)
    top.index_reduce_(1, chunk.block_U, live.amax(-1), "amax")
    live.sub_(top.index_select(1, chunk.block_U)[..., None]).exp_()
    v_U_K_H_D = _scratch.gather(v_tiles, chunk.tile_U).to(wide)
    pv = s.new_empty(heads, units, rows, v_tiles.shape[3])
    for head in range(heads):
        torch.bmm(s[head], v_U_K_H_D[:, :, head], out=pv[head])
    total = s.new_zeros(heads, blocks, real).index_add_(1, chunk.block_U, live.sum(-1))
    out = s.new_zeros(heads, blocks, real, pv.shape[3]).index_add_(1, chunk.block_U, pv[:, :, :real])
    return out.div_(total[..., None]), top, total


def _to_rows(q_N_Hq_D: torch.Tensor, source_rows: torch.Tensor, size: int, kv_heads: int) -> torch.Tensor:
    """Scaled queries as [Bk, Hk, R, D]; the rows of a block are (query, head in group), padded to whole row tiles."""
    _, q_heads, width = q_N_Hq_D.shape
    group = q_heads // kv_heads
    rows = -(-size * group // ROW_TILE) * ROW_TILE
    q = q_N_Hq_D.index_select(0, source_rows).float() if q_N_Hq_D.dtype != torch.float64 else q_N_Hq_D[source_rows]
    q = (q * (1.0 / math.sqrt(width))).view(-1, size, kv_heads, group, width)
    q_Bk_H_R_D = q.new_zeros(q.shape[0], kv_heads, rows, width)
    q_Bk_H_R_D[:, :, : size * group].view(-1, kv_heads, size, group, width).copy_(q.transpose(1, 2))
    return q_Bk_H_R_D


def _from_rows(out_H_Bk_R_D: torch.Tensor, size: int, group: int) -> torch.Tensor:
    """[H, Bk, size * G, D] back to [Bk * size, Hq, D]."""
    heads, blocks, _, width = out_H_Bk_R_D.shape
    return (
        out_H_Bk_R_D.reshape(heads, blocks, size, group, width)
        .permute(1, 2, 0, 3, 4)
        .reshape(blocks * size, heads * group, width)
    )


def attend_paged(
    q_B_Q_Hq_D: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, paged: PagedPlan
) -> torch.Tensor:
    """See `attention.api`."""
    requests, queries, q_heads, width = q_B_Q_Hq_D.shape
    kv_heads, size = k_pages.shape[2], paged.plan.block_size
    group = q_heads // kv_heads
    flat = q_B_Q_Hq_D.detach().reshape(-1, q_heads, width)
    q_rows = _to_rows(flat, paged.source_rows, size, kv_heads)
    parts = [_forward_chunk(q_rows, k_pages, v_pages, chunk, group)[0] for chunk in paged.plan.chunks]
    if not parts:
        return torch.zeros_like(q_B_Q_Hq_D)
    out = _from_rows(torch.cat(parts, 1), size, group).to(q_B_Q_Hq_D.dtype)
    if paged.complete:
        return out.view(requests, queries, q_heads, width)
    full = torch.zeros_like(flat)
    full[paged.source_rows[paged.real_rows]] = out[paged.real_rows]
    return full.view(requests, queries, q_heads, width)


def _plan_causal(bounds: list[int]) -> tuple[BlockPlan, torch.Tensor, torch.Tensor]:
    """`(plan, source row of each padded row, padded row of each token)` for sequences cut into 64-token tiles."""
    starts = torch.tensor(bounds[:-1], dtype=torch.int64)
    lengths = torch.tensor(bounds[1:], dtype=torch.int64) - starts
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    tiles_S = (lengths + TILE - 1) // TILE
    sequence_Bk = torch.repeat_interleave(torch.arange(len(starts)), tiles_S)
    first_S = tiles_S.cumsum(0) - tiles_S
    within_Bk = torch.arange(len(sequence_Bk)) - first_S[sequence_Bk]
    positions = within_Bk[:, None] * TILE + torch.arange(TILE)
    last = lengths[sequence_Bk][:, None] - 1
    real = positions <= last
    positions = torch.minimum(positions, last)
    source = (starts[sequence_Bk][:, None] + positions).reshape(-1)
    chunks = plan_units(first_S[sequence_Bk], within_Bk + 1, positions)
    return BlockPlan(TILE, len(sequence_Bk), chunks), source, real.reshape(-1).nonzero()[:, 0]


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        plan, source, real = _plan_causal(bounds)
        kv_heads, width = k.shape[1:]
        group = q.shape[1] // kv_heads
        q_rows = _to_rows(q, source, TILE, kv_heads)
        k_tiles = k.to(q_rows.dtype).index_select(0, source).view(-1, TILE, kv_heads, width)
        v_tiles = v.to(q_rows.dtype).index_select(0, source).view(-1, TILE, kv_heads, width)
        parts = [_forward_chunk(q_rows, k_tiles, v_tiles, chunk, group) for chunk in plan.chunks]
        if not parts:
            return torch.zeros_like(q)
        out, top, total = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        ctx.save_for_backward(q_rows, k_tiles, v_tiles, out, top, total, source, real)
        ctx.plan, ctx.group, ctx.dtype = plan, group, q.dtype
        return _from_rows(out, TILE, group)[real].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.saved_tensors:
            return (*(torch.zeros_like(grads[0]) for _ in range(3)), None)
        q_rows, k_tiles, v_tiles, out, top, total, _, real = ctx.saved_tensors
        blocks, heads, rows, width = q_rows.shape
        group: int = ctx.group
        grad = q_rows.new_zeros(blocks * TILE, heads * group, width)
        grad[real] = grads[0].to(q_rows.dtype)
        up_Bk_H_R_D = grad.view(blocks, TILE, heads, group, width).transpose(1, 2).reshape(blocks, heads, rows, width)
        dq, dk, dv = torch.zeros_like(q_rows), torch.zeros_like(k_tiles), torch.zeros_like(v_tiles)
        delta_H_Bk_R = (up_Bk_H_R_D.transpose(0, 1) * out).sum(-1)
        for chunk in ctx.plan.chunks:
            saved = (top, total, delta_H_Bk_R)
            _backward_chunk(chunk, group, (q_rows, k_tiles, v_tiles), up_Bk_H_R_D, saved, (dq, dk, dv))
        dq_T = _from_rows(dq.transpose(0, 1), TILE, group)[real] * (1.0 / math.sqrt(width))
        dk_T, dv_T = (tiles.view(-1, heads, width)[real] for tiles in (dk, dv))
        return dq_T.to(ctx.dtype), dk_T.to(ctx.dtype), dv_T.to(ctx.dtype), None


def _backward_chunk(
    chunk: Chunk,
    group: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    up_Bk_H_R_D: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Add one chunk's share to `grads`, the gradients of the padded queries, keys and values."""
    q_rows, k_tiles, v_tiles = inputs
    here, block_U = slice(chunk.block0, chunk.block1), chunk.block_U
    top, total, delta = (t[:, here].index_select(1, block_U)[..., None] for t in saved)
    k_U_K_H_D, v_U_K_H_D = k_tiles.index_select(0, chunk.tile_U), v_tiles.index_select(0, chunk.tile_U)
    q_H_U_R_D, s = _scores(q_rows, k_U_K_H_D, chunk, group)
    p = s.sub_(top).exp_().div_(total)
    up_H_U_R_D = up_Bk_H_R_D[here].transpose(0, 1).index_select(1, block_U)
    dq, dk, dv = grads
    dk_U, dv_U = torch.empty_like(k_U_K_H_D), torch.empty_like(v_U_K_H_D)
    dq_U = torch.empty_like(q_H_U_R_D)
    for head in range(q_rows.shape[1]):
        dv_U[:, :, head] = torch.bmm(p[head].transpose(1, 2), up_H_U_R_D[head])
        ds = torch.bmm(up_H_U_R_D[head], v_U_K_H_D[:, :, head].transpose(1, 2)).sub_(delta[head]).mul_(p[head])
        torch.bmm(ds, k_U_K_H_D[:, :, head], out=dq_U[head])
        dk_U[:, :, head] = torch.bmm(ds.transpose(1, 2), q_H_U_R_D[head])
    dq[here].transpose(0, 1).index_add_(1, block_U, dq_U)
    dk.index_add_(0, chunk.tile_U, dk_U)
    dv.index_add_(0, chunk.tile_U, dv_U)


def attend_causal(
    q_T_Hq_D: torch.Tensor, k_T_Hk_D: torch.Tensor, v_T_Hk_D: torch.Tensor, bounds: list[int]
) -> torch.Tensor:
    """See `attention.api`; `bounds` is `seq_starts` as a list."""
    return cast(torch.Tensor, _Causal.apply(q_T_Hq_D, k_T_Hk_D, v_T_Hk_D, bounds))
