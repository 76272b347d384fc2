"""The gradient of causal attention: plain torch on either device, with scores and weights computed again.

With p = exp(score − lse), delta = Σ_D grad·out and the scale inside q: ds = p·(grad·vᵀ − delta), dq = ds·k, dk = dsᵀ·q,
dv = pᵀ·grad. Memory is one chunk of units. There is no promise on the bits of gradients.
"""

import math
from dataclasses import replace

import torch

from odradek.kernels.attention.layout import from_rows, scaled, scores, to_rows
from odradek.kernels.attention.units import TILE, Units, plan_causal

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
    q_rows, lse = to_rows(scaled(q_T_Hq_D), plan, heads), to_rows(lse_T_Hq[..., None], plan, heads)
    # Rows that only pad a block repeat a real query; zeros here keep them out of every gradient.
    padding = torch.ones(plan.blocks + 1, TILE, 1, dtype=torch.bool, device=device)
    padding.view(-1)[real] = False
    up = to_rows(torch.cat([grad, delta], -1), plan, heads).masked_fill_(padding.repeat_interleave(group, 1), 0.0)
    k_tiles = k_T_Hk_D.to(wide).index_select(0, source).view(-1, TILE, heads, width)
    v_tiles = v_T_Hk_D.to(wide).index_select(0, source).view(-1, TILE, heads, width)
    grads = (torch.zeros_like(q_rows), torch.zeros_like(k_tiles), torch.zeros_like(v_tiles))
    for units in (units for chunk in plan.chunks for units in chunk):
        _add_units(_on(units, device), TILE * group, (q_rows, k_tiles, v_tiles), lse, up, grads)
    dq = from_rows(grads[0], plan, group)[real] * (1.0 / math.sqrt(width))
    dk, dv = (tiles.view(-1, heads, width)[real] for tiles in grads[1:])
    return dq.to(q_T_Hq_D.dtype), dk.to(k_T_Hk_D.dtype), dv.to(v_T_Hk_D.dtype)


def _on(units: Units, device: torch.device) -> Units:
    if device.type == "cpu":
        return units
    return replace(
        units,
        block_E=units.block_E.to(device),
        tile_U=units.tile_U.to(device),
        hidden_U_Q_K=units.hidden_U_Q_K.to(device),
    )


def _add_units(
    units: Units,
    real: int,
    inputs: Tensors3,
    lse_H_Bk_R_1: torch.Tensor,
    up_H_Bk_R_D1: torch.Tensor,
    grads: Tensors3,
) -> None:
    """Add one chunk's share to `grads`, the gradients of the padded queries, keys and values."""
    q_rows, k_tiles, v_tiles = inputs
    k_U_K_H_D, v_U_K_H_D = k_tiles.index_select(0, units.tile_U), v_tiles.index_select(0, units.tile_U)
    q_H_U_R_D, s = scores(q_rows, k_U_K_H_D, units, real)
    p = s.sub_(lse_H_Bk_R_1.index_select(1, units.block_E)).exp_()
    up_H_U_R_D1 = up_H_Bk_R_D1.index_select(1, units.block_E)
    up, delta = up_H_U_R_D1[..., :-1], up_H_U_R_D1[..., -1:]
    dq_U, dk_U, dv_U = torch.empty_like(q_H_U_R_D), torch.empty_like(k_U_K_H_D), torch.empty_like(v_U_K_H_D)
    for head in range(len(q_rows)):
        dv_U[:, :, head] = torch.bmm(p[head].transpose(1, 2), up[head])
        ds = torch.bmm(up[head], v_U_K_H_D[:, :, head].transpose(1, 2)).sub_(delta[head]).mul_(p[head])
        torch.bmm(ds, k_U_K_H_D[:, :, head], out=dq_U[head])
        dk_U[:, :, head] = torch.bmm(ds.transpose(1, 2), q_H_U_R_D[head])
    grads[0].index_add_(1, units.block_E, dq_U)
    grads[1].index_add_(0, units.tile_U, dk_U)
    grads[2].index_add_(0, units.tile_U, dv_U)
