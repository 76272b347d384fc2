"""What `logprob.token_logprobs` must compute, in float64, with all logits at once."""

import torch


def token_logprobs(
    hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(log p[target], −Σ p·log p)` of `softmax(hidden @ weight.T / temperature)`."""
    logp = torch.log_softmax(hidden_N_H.double() @ weight_V_H.double().t() / temperature, -1)
    return logp.gather(1, targets_N.long()[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
