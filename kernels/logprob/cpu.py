"""Token log-probabilities on CPU: `log_softmax` of a chunk of rows at a time."""

from typing import Any, cast

import torch

from odradek.kernels.logprob.backward import token_logprobs_backward
from odradek.kernels.rows.cpu import ROW_TILE, matmul_rows

CHUNK_LOGITS = 1 << 18
"""Logits held at once (1 MiB in float32, which stays in a core's cache). Larger runs from main memory, smaller pays the
fixed cost of a call more often. The bits do not depend on it."""


def row_logits(hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, temperature: float) -> torch.Tensor:
    """The one row function: sampler and trainer both take their logits from here."""
    logits = matmul_rows(hidden_N_H.detach(), weight_V_H.detach()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunk_rows(vocabulary: int) -> int:
    return max(ROW_TILE, CHUNK_LOGITS // vocabulary // ROW_TILE * ROW_TILE)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_N = hidden_N_H.new_empty(len(targets_N), dtype=torch.float32)
        entropy_N = torch.empty_like(logprob_N)
        rows = _chunk_rows(weight_V_H.shape[0])
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            logp = torch.log_softmax(row_logits(hidden_N_H[part], weight_V_H, temperature), -1)
            logprob_N[part] = logp.gather(1, targets_N[part, None])[:, 0]
            entropy_N[part] = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden_N_H, weight_V_H, targets_N, entropy_N)
        ctx.temperature = temperature
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = _chunk_rows(ctx.saved_tensors[1].shape[0])
        found = token_logprobs_backward(
            ctx.saved_tensors, grads[0], grads[1], ctx.temperature, row_logits, rows, ctx.needs_input_grad
        )
        return (*found, None, None)


def token_logprobs(
    hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `logprob.api`."""
    out = _TokenLogprobs.apply(hidden_N_H.contiguous(), weight_V_H.contiguous(), targets_N.long(), temperature)
    return cast(tuple[torch.Tensor, torch.Tensor], out)
