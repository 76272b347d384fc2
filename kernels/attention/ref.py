"""What the attention must compute, in float64: every query, head and key written out, no tiles."""

import math

import torch


def attend_causal(
    q_T_Hq_D: torch.Tensor, k_T_Hk_D: torch.Tensor, v_T_Hk_D: torch.Tensor, seq_starts: torch.Tensor
) -> torch.Tensor:
    """[T, Hq, D]: softmax(q·k / sqrt(D))·v over the keys of the same sequence that are not after the query."""
    tokens, q_heads, width = q_T_Hq_D.shape
    group = q_heads // k_T_Hk_D.shape[1]
    k = k_T_Hk_D.double().repeat_interleave(group, 1)
    v = v_T_Hk_D.double().repeat_interleave(group, 1)
    sequence = torch.zeros(tokens, dtype=torch.int64)
    for start in seq_starts.tolist()[1:-1]:
        sequence[start:] += 1
    place = torch.arange(tokens)
    seen = (sequence[:, None] == sequence) & (place[:, None] >= place)
    scores_Hq_T_T = torch.einsum("qhd,khd->hqk", q_T_Hq_D.double(), k) / math.sqrt(width)
    weights = torch.softmax(scores_Hq_T_T.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def attend_paged(
    q_B_Q_Hq_D: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_B_M: torch.Tensor,
    q_positions_B_Q: torch.Tensor,
    q_len_B: torch.Tensor,
) -> torch.Tensor:
    """[B, Q, Hq, D], zeros past `q_len`: each query against its request's pages laid out in a row."""
    width = q_B_Q_Hq_D.shape[3]
    group = q_B_Q_Hq_D.shape[2] // k_pages.shape[2]
    out = torch.zeros(q_B_Q_Hq_D.shape, dtype=torch.float64)
    for b, queries in enumerate(q_len_B.tolist()):
        pages = block_table_B_M[b].long()
        k = k_pages[pages].flatten(0, 1).double().repeat_interleave(group, 1)
        v = v_pages[pages].flatten(0, 1).double().repeat_interleave(group, 1)
        for i in range(queries):
            seen = int(q_positions_B_Q[b, i]) + 1
            scores_Hq_K = torch.einsum("hd,khd->hk", q_B_Q_Hq_D[b, i].double(), k[:seen]) / math.sqrt(width)
            out[b, i] = torch.einsum("hk,khd->hd", torch.softmax(scores_Hq_K, -1), v[:seen])
    return out
