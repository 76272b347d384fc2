"""The expert layer on CPU: routing, then the plain mixture over row-stable matmuls."""

import torch

from odradek.kernels.moe.plain import mix_experts
from odradek.kernels.moe.routing import route
from odradek.kernels.rows.cpu import linear


def expert_layer(
    x_N_H: torch.Tensor,
    router_w_E_H: torch.Tensor,
    w13_E_2F_H: torch.Tensor,
    w2_E_H_F: torch.Tensor,
    top_k: int,
    norm_topk: bool,
    expert_ids: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `moe.api`."""
    weights_N_K, ids_N_K = route(linear(x_N_H, router_w_E_H), top_k, norm_topk, expert_ids)
    return mix_experts(x_N_H, weights_N_K, ids_N_K, w13_E_2F_H, w2_E_H_F, linear), ids_N_K.int()
