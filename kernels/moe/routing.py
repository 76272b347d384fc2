"""Routing, shared by both paths: small per-row work in plain torch, stable for each row."""

import torch


def route(
    logits_N_E: torch.Tensor, top_k: int, norm_topk: bool, expert_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 mixing weights [N, K] (differentiable in the logits) and int64 expert ids [N, K]."""
    weights_N_E = torch.softmax(logits_N_E.float(), -1)
    if expert_ids is None:
        # A stable sort and not topk: topk leaves open which of two equal scores it takes.
        ids_N_K = torch.sort(weights_N_E.detach(), dim=-1, descending=True, stable=True).indices[:, :top_k]
    else:
        ids_N_K = expert_ids.long()
    weights_N_K = weights_N_E.gather(1, ids_N_K)
    if norm_topk:
        weights_N_K = weights_N_K / weights_N_K.sum(-1, keepdim=True)
    return weights_N_K, ids_N_K


def by_expert(ids_N_K: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(order [N*K], counts [E])`: the flat (token, k) slots sorted by expert, and how many each expert has."""
    flat = ids_N_K.reshape(-1)
    return torch.argsort(flat, stable=True), torch.bincount(flat, minlength=experts)
