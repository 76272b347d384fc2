"""What `moe.expert_layer` must compute, in float64, one token and one expert at a time."""

import torch


def expert_layer(
    x_N_H: torch.Tensor,
    router_w_E_H: torch.Tensor,
    w13_E_2F_H: torch.Tensor,
    w2_E_H_F: torch.Tensor,
    top_k: int,
    norm_topk: bool,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """y [N, H] for the given choice of experts; the choice itself is the router's and not approximated here."""
    width = w2_E_H_F.shape[2]
    rows: list[torch.Tensor] = []
    for token, chosen in zip(x_N_H.double(), expert_ids.tolist(), strict=True):
        probabilities = torch.softmax(router_w_E_H.double() @ token, 0)
        mass = sum(probabilities[e] for e in chosen) if norm_topk else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            gate, up = (w13_E_2F_H[e].double() @ token).split(width)
            y = y + probabilities[e] / mass * (w2_E_H_F[e].double() @ (gate * torch.sigmoid(gate) * up))
        rows.append(y)
    return torch.stack(rows) if rows else x_N_H.double()
