"""Token log-probabilities on CPU, a chunk of rows at a time.

With p = softmax(z), H = −Σ p·log p and z = logits/τ: d logprob/dz = onehot − p, dH/dz = −p·(log p + H).
"""

from typing import Any, cast

import torch

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
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        hidden_N_H, weight_V_H, targets_N, entropy_N = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        grad_hidden = torch.zeros_like(hidden_N_H)
        grad_weight = torch.zeros(weight_V_H.shape, dtype=torch.float32)
        with_entropy = bool((grad_entropy != 0).any())
        rows = _chunk_rows(weight_V_H.shape[0])
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            logp = torch.log_softmax(row_logits(hidden_N_H[part], weight_V_H, ctx.temperature), -1)
            p = logp.exp()
            up = grad_logprob[part, None]
            if with_entropy:
                # up·(onehot − p) − h·p·(logp + H): everything but the one-hot term is −p times a sum.
                p.mul_(logp.add_(entropy_N[part, None]).mul_(grad_entropy[part, None]).add_(up)).neg_()
            else:
                p.mul_(-up)
            p.scatter_add_(1, targets_N[part, None], up)
            if ctx.temperature != 1.0:
                p.div_(ctx.temperature)
            narrow = p.to(hidden_N_H.dtype)
            if ctx.needs_input_grad[0]:
                torch.mm(narrow, weight_V_H, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight.addmm_(p.t(), hidden_N_H[part].float())
        return (
            grad_hidden if ctx.needs_input_grad[0] else None,
            grad_weight.to(weight_V_H.dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def token_logprobs(
    hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `logprob.api`."""
    out = _TokenLogprobs.apply(hidden_N_H.contiguous(), weight_V_H.contiguous(), targets_N.long(), temperature)
    return cast(tuple[torch.Tensor, torch.Tensor], out)
