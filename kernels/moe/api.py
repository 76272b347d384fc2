"""The expert layer of Qwen3-MoE: softmax over all experts, top-k, optional renormalisation, gated MLP per expert.

`w13` stacks each expert's gate projection on its up projection ([E, 2F, H]), `w2` is its down projection ([E, H, F]):
y = Σ_k weight_k · w2_e(silu(gate_e(x)) · up_e(x)), summed in the order k = 0, 1, …, so heaviest first.

Promises: a row's bits and its choice of experts do not depend on the other rows; equal router scores go to the lower
expert index. With `expert_ids` given the choice is replayed (router replay) while the mixing weights, and hence the
router's gradient, are still computed from `router_w`.

Dimensions: N tokens, H hidden, E experts, F expert width, K experts chosen.
"""

import torch

from odradek.kernels.paths import path_of, require


def expert_layer(
    x_N_H: torch.Tensor,
    router_w_E_H: torch.Tensor,
    w13_E_2F_H: torch.Tensor,
    w2_E_H_F: torch.Tensor,
    top_k: int,
    norm_topk: bool,
    expert_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(y [N, H], expert_ids int32 [N, K])`; differentiable in `x` and all three weights."""
    experts, hidden = router_w_E_H.shape
    require(
        "moe.expert_layer",
        x_N_H.dim() == 2
        and x_N_H.shape[1] == hidden
        and w13_E_2F_H.shape == (experts, 2 * w2_E_H_F.shape[2], hidden)
        and w2_E_H_F.shape[:2] == (experts, hidden)
        and 1 <= top_k <= experts,
        "x [N, H], router [E, H], w13 [E, 2F, H], w2 [E, H, F], 1 <= top_k <= E",
        x=tuple(x_N_H.shape),
        router=tuple(router_w_E_H.shape),
        w13=tuple(w13_E_2F_H.shape),
        w2=tuple(w2_E_H_F.shape),
        top_k=top_k,
    )
    if expert_ids is not None:
        require(
            "moe.expert_layer",
            tuple(expert_ids.shape) == (x_N_H.shape[0], top_k) and not expert_ids.dtype.is_floating_point,
            "replayed expert_ids as integers [N, top_k]",
            expert_ids=tuple(expert_ids.shape),
            dtype=expert_ids.dtype,
        )
    arguments = (x_N_H, router_w_E_H, w13_E_2F_H, w2_E_H_F, top_k, norm_topk, expert_ids)
    if path_of("moe.expert_layer", x_N_H, router_w_E_H, w13_E_2F_H, w2_E_H_F, expert_ids) == "cpu":
        from odradek.kernels.moe import cpu

        return cpu.expert_layer(*arguments)
    from odradek.kernels.moe import gpu

    return gpu.expert_layer(*arguments)
