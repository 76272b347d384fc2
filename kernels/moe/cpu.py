"""The expert layer on CPU: slots sorted by expert, one row-stable matmul per expert that has any."""

import torch
import torch.nn.functional as F

from odradek.kernels.moe.routing import by_expert, route
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
    experts, hidden, width = w2_E_H_F.shape
    weights_N_K, ids_N_K = route(linear(x_N_H, router_w_E_H), top_k, norm_topk, expert_ids)
    order, counts = by_expert(ids_N_K, experts)
    sorted_S_H = x_N_H.index_select(0, order // top_k)
    done: list[torch.Tensor] = []
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if not count:
            continue
        gate_up = linear(sorted_S_H[start : start + count], w13_E_2F_H[expert])
        done.append(linear(F.silu(gate_up[:, :width]) * gate_up[:, width:], w2_E_H_F[expert]))
        start += count
    if not done:
        return torch.zeros_like(x_N_H), ids_N_K.int()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    slots_N_K_H = torch.cat(done).index_select(0, back).view(-1, top_k, hidden)
    y = weights_N_K[:, 0, None] * slots_N_K_H[:, 0]
    for k in range(1, top_k):
        # One addition after the other: the order of the sum is part of the bits.
        y = y + weights_N_K[:, k, None] * slots_N_K_H[:, k]
    return y.to(x_N_H.dtype), ids_N_K.int()
