"""Between packed tokens and the padded blocks that the units of `units.py` multiply; plain torch on any device."""

import math

import torch

from odradek.kernels.attention.units import ROW_TILE, TILE, BlockPlan, Units


def scaled(q_N_Hq_D: torch.Tensor) -> torch.Tensor:
    """Queries divided by sqrt(D), in float32 at least."""
    wide = q_N_Hq_D if q_N_Hq_D.dtype == torch.float64 else q_N_Hq_D.float()
    return wide * (1.0 / math.sqrt(q_N_Hq_D.shape[2]))


def to_rows(x_N_Hq_D: torch.Tensor, plan: BlockPlan, kv_heads: int) -> torch.Tensor:
    """[Hk, Bk + 1, R, D]: the rows of a block are (query, head of the group), then zeros up to a whole row tile.

    The block after the last is the spare one, all zeros.
    """
    _, q_heads, width = x_N_Hq_D.shape
    size, group = plan.block_size, q_heads // kv_heads
    rows = -(-size * group // ROW_TILE) * ROW_TILE
    x = x_N_Hq_D.index_select(0, plan.source_rows.to(x_N_Hq_D.device)).view(plan.blocks, size, kv_heads, group, width)
    x_H_Bk_R_D = x.new_zeros(kv_heads, plan.blocks + 1, rows, width)
    real = x_H_Bk_R_D[:, :-1, : size * group].view(kv_heads, plan.blocks, size, group, width)
    real.copy_(x.permute(2, 0, 1, 3, 4))
    return x_H_Bk_R_D


def from_rows(x_H_Bk_R_D: torch.Tensor, plan: BlockPlan, group: int) -> torch.Tensor:
    """Without spare block and padding rows, [Bk * size, Hq, D]."""
    (heads, _, _, width), size = x_H_Bk_R_D.shape, plan.block_size
    queries = x_H_Bk_R_D[:, :-1, : size * group].view(heads, plan.blocks, size, group, width)
    return queries.permute(1, 2, 0, 3, 4).reshape(plan.blocks * size, heads * group, width)


def select_rows(x_H_Bk_R_D: torch.Tensor, units: Units, real: int) -> torch.Tensor:
    """Rows of each unit's blocks, [Hk, U, R', D]: all of one block's, or the `real` ones of every sharer's."""
    if units.sharers == 1:
        return x_H_Bk_R_D.index_select(1, units.block_E)
    x_H_E_r_D = x_H_Bk_R_D[:, :, :real].index_select(1, units.block_E)
    return x_H_E_r_D.view(x_H_E_r_D.shape[0], -1, units.sharers * real, x_H_E_r_D.shape[3])


def scores(
    q_H_Bk_R_D: torch.Tensor, k_U_K_H_D: torch.Tensor, units: Units, real: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(queries, scores)` of units: [Hk, U, R', D] and [Hk, U, R', K], hidden keys at −inf."""
    q_H_U_R_D = select_rows(q_H_Bk_R_D, units, real)
    s_H_U_R_K = q_H_U_R_D.new_empty(*q_H_U_R_D.shape[:3], TILE)
    for head in range(len(q_H_U_R_D)):
        torch.bmm(q_H_U_R_D[head], k_U_K_H_D[:, :, head].transpose(1, 2), out=s_H_U_R_K[head])
    hidden_U_Q_K = units.hidden_U_Q_K
    if len(hidden_U_Q_K):
        group = real // hidden_U_Q_K.shape[1]
        hidden_U_R_K = hidden_U_Q_K.repeat_interleave(group, 1) if group > 1 else hidden_U_Q_K
        s_H_U_R_K[:, units.first_masked :, :real].masked_fill_(hidden_U_R_K, -math.inf)
    return q_H_U_R_D, s_H_U_R_K


def live_rows(x_H_U_R_X: torch.Tensor, units: Units, real: int) -> torch.Tensor:
    """A view without padding rows, one entry a block of each unit: [Hk, E, real, X]."""
    if units.sharers == 1:
        return x_H_U_R_X[:, :, :real]
    return x_H_U_R_X.view(x_H_U_R_X.shape[0], -1, real, x_H_U_R_X.shape[3])
