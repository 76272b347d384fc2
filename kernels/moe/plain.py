"""The experts' mixture in plain torch, on any device: the CPU path, and what the GPU path differentiates."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from odradek.kernels.moe.routing import by_expert

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def mix_experts(
    x_N_H: torch.Tensor,
    weights_N_K: torch.Tensor,
    ids_N_K: torch.Tensor,
    w13_E_2F_H: torch.Tensor,
    w2_E_H_F: torch.Tensor,
    linear: Linear,
) -> torch.Tensor:
    """Σ_k weight_k · expert_k(x), in the order of k; one matmul per expert that has any row."""
    experts, hidden, width = w2_E_H_F.shape
    top_k = ids_N_K.shape[1]
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
        return torch.zeros_like(x_N_H)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    slots_N_K_H = torch.cat(done).index_select(0, back).view(-1, top_k, hidden)
    y = weights_N_K[:, 0, None] * slots_N_K_H[:, 0]
    for k in range(1, top_k):
        # One addition after the other: the order of the sum is part of the bits.
        y = y + weights_N_K[:, k, None] * slots_N_K_H[:, k]
    return y.to(x_N_H.dtype)
