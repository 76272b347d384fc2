"""The gradient of causal attention: plain torch on either device, with scores and weights computed again.

With p = exp(score − lse), delta = Σ_D grad·out and the scale inside q: ds = p·(grad·vᵀ − delta), dq = ds·k, dk = dsᵀ·q,
dv = pᵀ·grad. Memory is one chunk of units. There is no promise on the bits of gradients.
"""

import math
from dataclasses import replace

import torch

from odradek.kernels.attention.layout import from_rows, scaled, scores, to_rows
from odradek.kernels.attention.units import TILE, Chunk, plan_causal

Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def causal_backward(
    q_T_Hq_D: torch.Tensor,
    k_T_Hk_D: torch.Tensor,
    v_T_Hk_D: torch.Tensor,
    out_T_Hq_D: torch.Tensor,
    lse_T_Hq: torch.Tensor,
    grad_T_Hq_D: torch.Tensor,
    bounds: tuple[int, ...],
) -> Tensors3:
    """Gradients of q, k and v. `lse` is the log of the sum of exponentials of each query's scores."""
    plan = plan_causal(bounds)
    device, wide = q_T_Hq_D.device, lse_T_Hq.dtype
    source, real = plan.source_rows.to(device), plan.real_rows.to(device)
    heads, width = k_T_Hk_D.shape[1:]
    group = q_T_Hq_D.shape[1] // heads
    grad = grad_T_Hq_D.to(wide)
    delta = (grad * out_T_Hq_D.to(wide)).sum(-1, keepdim=True)
    q_rows = to_rows(scaled(q_T_Hq_D), source, TILE, heads)
    lse = to_rows(lse_T_Hq[..., None], source, TILE, heads)
    # Rows that only pad a block repeat a real query; zeros here keep them out of every gradient.
    padding = torch.ones(len(source), dtype=torch.bool, device=device)
    padding[real] = False
    up = to_rows(torch.cat([grad, delta], -1), source, TILE, heads)
    up.masked_fill_(padding.view(-1, 1, TILE, 1).repeat_interleave(group, 2), 0.0)
    k_tiles = k_T_Hk_D.to(wide).index_select(0, source).view(-1, TILE, heads, width)
    v_tiles = v_T_Hk_D.to(wide).index_select(0, source).view(-1, TILE, heads, width)
    grads = (torch.zeros_like(q_rows), torch.zeros_like(k_tiles), torch.zeros_like(v_tiles))
    for chunk in plan.chunks:
        _add_chunk(_on(chunk, device), group, (q_rows, k_tiles, v_tiles), lse, up, grads)
    dq = from_rows(grads[0].transpose(0, 1), TILE, group)[real] * (1.0 / math.sqrt(width))
    dk, dv = (tiles.view(-1, heads, width)[real] for tiles in grads[1:])
    return dq.to(q_T_Hq_D.dtype), dk.to(k_T_Hk_D.dtype), dv.to(v_T_Hk_D.dtype)


def _on(chunk: Chunk, device: torch.device) -> Chunk:
    if device.type == "cpu":
        return chunk
    return replace(
        chunk,
        block_U=chunk.block_U.to(device),
        tile_U=chunk.tile_U.to(device),
        hidden_U_Q_K=chunk.hidden_U_Q_K.to(device),
    )


def _add_chunk(
    chunk: Chunk,
    group: int,
    inputs: Tensors3,
    lse_Bk_H_R_1: torch.Tensor,
    up_Bk_H_R_D1: torch.Tensor,
    grads: Tensors3,
) -> None:
    """Add one chunk's share to `grads`, the gradients of the padded queries, keys and values."""
    q_rows, k_tiles, v_tiles = inputs
    here, block_U = slice(chunk.block0, chunk.block1), chunk.block_U
    k_U_K_H_D, v_U_K_H_D = k_tiles.index_select(0, chunk.tile_U), v_tiles.index_select(0, chunk.tile_U)
    q_H_U_R_D, s = scores(q_rows, k_U_K_H_D, chunk, group)
    p = s.sub_(lse_Bk_H_R_1[here].transpose(0, 1).index_select(1, block_U)).exp_()
    up_H_U_R_D1 = up_Bk_H_R_D1[here].transpose(0, 1).index_select(1, block_U)
    up, delta = up_H_U_R_D1[..., :-1], up_H_U_R_D1[..., -1:]
    dq_U, dk_U, dv_U = torch.empty_like(q_H_U_R_D), torch.empty_like(k_U_K_H_D), torch.empty_like(v_U_K_H_D)
    for head in range(q_rows.shape[1]):
        dv_U[:, :, head] = torch.bmm(p[head].transpose(1, 2), up[head])
        ds = torch.bmm(up[head], v_U_K_H_D[:, :, head].transpose(1, 2)).sub_(delta[head]).mul_(p[head])
        torch.bmm(ds, k_U_K_H_D[:, :, head], out=dq_U[head])
        dk_U[:, :, head] = torch.bmm(ds.transpose(1, 2), q_H_U_R_D[head])
    grads[0][here].transpose(0, 1).index_add_(1, block_U, dq_U)
    grads[1].index_add_(0, chunk.tile_U, dk_U)
    grads[2].index_add_(0, chunk.tile_U, dv_U)
