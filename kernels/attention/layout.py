"""Between packed tokens and the padded blocks that the units of `units.py` multiply; plain torch on any device."""

import math

import torch

from odradek.kernels.attention.units import ROW_TILE, TILE, Chunk


def scaled(q_N_Hq_D: torch.Tensor) -> torch.Tensor:
    """Queries divided by sqrt(D), in float32 at least."""
    wide = q_N_Hq_D if q_N_Hq_D.dtype == torch.float64 else q_N_Hq_D.float()
    return wide * (1.0 / math.sqrt(q_N_Hq_D.shape[2]))


def to_rows(x_N_Hq_D: torch.Tensor, source_rows: torch.Tensor, size: int, kv_heads: int) -> torch.Tensor:
    """[Bk, Hk, R, D]: the rows of a block are (query, head of the group), then zeros up to a whole row tile."""
    _, q_heads, width = x_N_Hq_D.shape
    group = q_heads // kv_heads
    rows = -(-size * group // ROW_TILE) * ROW_TILE
    x = x_N_Hq_D.index_select(0, source_rows).view(-1, size, kv_heads, group, width)
    x_Bk_H_R_D = x.new_zeros(x.shape[0], kv_heads, rows, width)
    x_Bk_H_R_D[:, :, : size * group].view(-1, kv_heads, size, group, width).copy_(x.transpose(1, 2))
    return x_Bk_H_R_D


def from_rows(x_H_Bk_R_D: torch.Tensor, size: int, group: int) -> torch.Tensor:
    """[Hk, Bk, size * G, D] back to [Bk * size, Hq, D]."""
    heads, blocks, _, width = x_H_Bk_R_D.shape
    queries = x_H_Bk_R_D.reshape(heads, blocks, size, group, width).permute(1, 2, 0, 3, 4)
    return queries.reshape(blocks * size, heads * group, width)


def scores(
    q_Bk_H_R_D: torch.Tensor, k_U_K_H_D: torch.Tensor, chunk: Chunk, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(queries, scores)` of a chunk's units: [Hk, U, R, D] and [Hk, U, R, K], hidden keys at −inf."""
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
