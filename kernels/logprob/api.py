"""Log-probability and entropy of tokens from hidden states, without ever holding all logits.

Promises:
- Memory is one chunk of logits, in forward and backward, whatever N is (the backward computes each chunk again).
- A row's bits do not depend on N or on its place.
- One row function: on CPU `torch.log_softmax(row_logits(h, w, t), -1)[target]` has the bits of
  `token_logprobs(h, w, target, t)`, so what the sampler logs is what the trainer computes. On CUDA the kernel never
  stores its logits and sums them tile by tile: there a sampler logs `token_logprobs` of the token it chose.

Dimensions: N tokens, H hidden, V vocabulary.
"""

import torch

from odradek.kernels.paths import path_of, require


def _check(kernel: str, hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> None:
    require(
        kernel,
        hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1] and hidden.dtype == weight.dtype,
        "hidden [N, H] and weight [V, H] of one dtype",
        hidden=tuple(hidden.shape),
        weight=tuple(weight.shape),
        hidden_dtype=hidden.dtype,
        weight_dtype=weight.dtype,
    )
    require(kernel, temperature > 0, "temperature > 0", temperature=temperature)


def token_logprobs(
    hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 `(logprob [N], entropy [N])` of `softmax(hidden @ weight.T / temperature)`; both are differentiable."""
    _check("logprob.token_logprobs", hidden_N_H, weight_V_H, temperature)
    require(
        "logprob.token_logprobs",
        targets_N.shape == hidden_N_H.shape[:1] and targets_N.dtype in (torch.int32, torch.int64),
        "integer targets [N]",
        targets=tuple(targets_N.shape),
        dtype=targets_N.dtype,
    )
    if path_of("logprob.token_logprobs", hidden_N_H, weight_V_H, targets_N) == "cpu":
        from odradek.kernels.logprob import cpu

        return cpu.token_logprobs(hidden_N_H, weight_V_H, targets_N, temperature)
    from odradek.kernels.logprob import gpu

    return gpu.token_logprobs(hidden_N_H, weight_V_H, targets_N, temperature)


def row_logits(hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Float32 logits [N, V] divided by the temperature, for the few rows that are sampled from. No gradient."""
    _check("logprob.row_logits", hidden_N_H, weight_V_H, temperature)
    if path_of("logprob.row_logits", hidden_N_H, weight_V_H) == "cpu":
        from odradek.kernels.logprob import cpu

        return cpu.row_logits(hidden_N_H, weight_V_H, temperature)
    from odradek.kernels.logprob import gpu

    return gpu.row_logits(hidden_N_H, weight_V_H, temperature)
