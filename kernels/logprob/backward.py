"""The gradient of token log-probability and entropy, in plain torch for both devices, one chunk of logits at a time.

With z = logits/τ, p = softmax(z) and H = −Σ p·log p: d logprob/dz = onehot − p, dH/dz = −p·(log p + H).
"""

from collections.abc import Callable

import torch

Saved = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
RowLogits = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def token_logprobs_backward(
    saved: Saved,
    grad_logprob_N: torch.Tensor,
    grad_entropy_N: torch.Tensor,
    temperature: float,
    row_logits: RowLogits,
    chunk_rows: int,
    needed: tuple[bool, ...],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of hidden and weight, each only if needed; `saved` is hidden, weight, targets, entropy."""
    hidden_N_H, weight_V_H, targets_N, entropy_N = saved
    grad_hidden = torch.zeros_like(hidden_N_H) if needed[0] else None
    grad_weight = torch.zeros_like(weight_V_H, dtype=torch.float32) if needed[1] else None
    with_entropy = bool((grad_entropy_N != 0).any())
    for start in range(0, len(targets_N), chunk_rows):
        part = slice(start, start + chunk_rows)
        logp = torch.log_softmax(row_logits(hidden_N_H[part], weight_V_H, temperature), -1)
        up = grad_logprob_N[part, None]
        grad = logp.exp()
        if with_entropy:
            # Both terms but the one-hot are −p times something: −p·(up + h·(log p + H)).
            grad.mul_(logp.add_(entropy_N[part, None]).mul_(grad_entropy_N[part, None]).add_(up)).neg_()
        else:
            grad.mul_(-up)
        grad.scatter_add_(1, targets_N[part, None], up)
        if temperature != 1.0:
            grad.div_(temperature)
        if grad_hidden is not None:
            torch.mm(grad.to(hidden_N_H.dtype), weight_V_H, out=grad_hidden[part])
        if grad_weight is not None:
            grad_weight.addmm_(grad.t(), hidden_N_H[part].float())
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight_V_H.dtype)
