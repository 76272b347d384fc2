"""Tiled attention: one function for the trainer's packed sequences and for the engine's paged cache.

Promise: for the same token of the same sequence, `attend_causal`, a chunked prefill and a decode step by
`attend_paged` give the same bits, whatever else is in the batch and however the sequence was cut into chunks. On CPU
this is checked for float32 on one thread; `numerics.numerics_id` names the circumstances.
How: every query meets its keys in absolute tiles of 64 (`TILE`), in ascending order; queries are padded to whole row
tiles; keys after the query weigh exactly zero.

Heads are grouped (GQA): query head h reads key head h // (Hq // Hk). Scores are divided by sqrt(D).
Dimensions: T packed tokens, S sequences, B requests, Q new tokens a request, Hq/Hk query/key heads, D head width,
P pages of 64 tokens in the cache, M pages a request at most.
"""

import torch

from odradek.kernels.attention.units import TILE, BlockPlan, plan_pages
from odradek.kernels.paths import path_of, require

PagedPlan = BlockPlan
"""What the layers of one engine step share."""

__all__ = ["TILE", "PagedPlan", "attend_causal", "attend_paged", "plan_paged"]


def attend_causal(
    q_T_Hq_D: torch.Tensor, k_T_Hk_D: torch.Tensor, v_T_Hk_D: torch.Tensor, seq_starts: torch.Tensor
) -> torch.Tensor:
    """Causal attention inside each packed sequence, [T, Hq, D]; differentiable in q, k and v.

    `seq_starts` int32 [S+1] ascends from 0 to T: sequence s holds tokens seq_starts[s] to seq_starts[s+1].
    """
    tokens, q_heads, width = q_T_Hq_D.shape
    require(
        "attention.attend_causal",
        k_T_Hk_D.shape == v_T_Hk_D.shape
        and k_T_Hk_D.shape[0] == tokens
        and k_T_Hk_D.shape[2] == width
        and q_heads % k_T_Hk_D.shape[1] == 0
        and q_T_Hq_D.dtype == k_T_Hk_D.dtype == v_T_Hk_D.dtype,
        "q [T, Hq, D], k and v [T, Hk, D] of one dtype, Hk dividing Hq",
        q=tuple(q_T_Hq_D.shape),
        k=tuple(k_T_Hk_D.shape),
        v=tuple(v_T_Hk_D.shape),
    )
    bounds = tuple(seq_starts.tolist())
    require(
        "attention.attend_causal",
        len(bounds) >= 1 and bounds[0] == 0 and bounds[-1] == tokens and list(bounds) == sorted(bounds),
        f"seq_starts ascending from 0 to T={tokens}",
        seq_starts=[*bounds[:3], "…", *bounds[-2:]] if len(bounds) > 5 else bounds,
    )
    if path_of("attention.attend_causal", q_T_Hq_D, k_T_Hk_D, v_T_Hk_D) == "cpu":
        from odradek.kernels.attention import cpu

        return cpu.attend_causal(q_T_Hq_D, k_T_Hk_D, v_T_Hk_D, bounds)
    from odradek.kernels.attention import gpu

    return gpu.attend_causal(q_T_Hq_D, k_T_Hk_D, v_T_Hk_D, bounds)


def plan_paged(block_table_B_M: torch.Tensor, q_positions_B_Q: torch.Tensor, q_len_B: torch.Tensor) -> PagedPlan | None:
    """The plan of one engine step, for `attend_paged`. None on CUDA, where blocks are laid out on the device."""
    if path_of("attention.plan_paged", block_table_B_M, q_positions_B_Q, q_len_B) == "cuda":
        return None
    return plan_pages(block_table_B_M, q_positions_B_Q, q_len_B)


def attend_paged(
    q_B_Q_Hq_D: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table_B_M: torch.Tensor,
    q_positions_B_Q: torch.Tensor,
    q_len_B: torch.Tensor,
    plan: PagedPlan | None = None,
) -> torch.Tensor:
    """Attention of new tokens to their own request's cached tokens, [B, Q, Hq, D]; no gradient.

    The new tokens' own keys and values are already in the pages (`k_pages`, `v_pages` [P, 64, Hk, D]; page m of request
    b is `block_table_B_M[b, m]`). Query i of request b stands at position `q_positions_B_Q[b, i]` and sees positions up
    to its own; only the first `q_len_B[b]` queries count, the rows of the others come back as zeros. Positions within a
    request ascend. Pages must be made with finite content (zeros, not `torch.empty`): an unused slot weighs zero, but
    0·NaN is NaN.
    The layers of one step share their plan: make it once by `plan_paged` and pass it to spare its cost.
    """
    requests, queries, q_heads, width = q_B_Q_Hq_D.shape
    require(
        "attention.attend_paged",
        k_pages.shape == v_pages.shape
        and k_pages.shape[1] == TILE
        and k_pages.shape[3] == width
        and q_heads % k_pages.shape[2] == 0
        and q_B_Q_Hq_D.dtype == k_pages.dtype == v_pages.dtype
        and block_table_B_M.shape[0] == requests
        and tuple(q_positions_B_Q.shape) == (requests, queries)
        and tuple(q_len_B.shape) == (requests,),
        "q [B, Q, Hq, D], pages [P, 64, Hk, D] of one dtype, block_table [B, M], q_positions [B, Q], q_len [B]",
        q=tuple(q_B_Q_Hq_D.shape),
        k_pages=tuple(k_pages.shape),
        v_pages=tuple(v_pages.shape),
        block_table=tuple(block_table_B_M.shape),
        q_positions=tuple(q_positions_B_Q.shape),
        q_len=tuple(q_len_B.shape),
    )
    tensors = (q_B_Q_Hq_D, k_pages, v_pages, block_table_B_M, q_positions_B_Q, q_len_B)
    if path_of("attention.attend_paged", *tensors) == "cpu":
        from odradek.kernels.attention import cpu

        plan = plan or plan_pages(block_table_B_M, q_positions_B_Q, q_len_B)
        return cpu.attend_paged(q_B_Q_Hq_D, k_pages, v_pages, plan)
    from odradek.kernels.attention import gpu

    return gpu.attend_paged(q_B_Q_Hq_D, k_pages, v_pages, block_table_B_M, q_positions_B_Q, q_len_B)
