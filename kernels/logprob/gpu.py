# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Token log-probabilities in Triton: 64 rows a program, the vocabulary in ascending tiles, no logit leaves the chip.

Carried over the tiles: m = max z, l = Σ exp(z − m), a = Σ exp(z − m)·z and the target's z. Then lse = m + log l,
logprob = z_target − lse, entropy = lse − a/l. The vocabulary is not split over programs: a row keeps its bits, at the
price that few rows leave most of the chip idle. Backward: the chunked torch formula of `logprob.backward`.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from odradek.kernels.logprob.backward import token_logprobs_backward
from odradek.kernels.rows.gpu import matmul_rows, tile_product

BLOCKS = {"BLOCK_N": 64, "BLOCK_V": 64, "BLOCK_K": 32}
"""Rows, vocabulary and depth of a tile: those of the linear layer, so that logits here and there are the same sums."""

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""As in `rows.gpu`."""

BACKWARD_LOGITS = 1 << 26
"""Logits held at once in the backward (256 MiB in float32). Smaller starves the matmuls, larger crowds out the
activations."""


@triton.jit
def token_logprobs_kernel(
    hidden_ptr,
    weight_ptr,
    targets_ptr,
    logprob_ptr,
    entropy_ptr,
    N,
    V,
    H,
    temperature,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    target = tl.load(targets_ptr + n, mask=n < N, other=0)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    weighted = tl.zeros((BLOCK_N,), tl.float32)
    chosen = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, V, BLOCK_V):
        v = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        z = tile_product(hidden_ptr + n * H, n < N, weight_ptr + v * H, v < V, H, acc, BLOCK_K)
        z = z / temperature
        chosen += tl.sum(tl.where(v[None, :] == target[:, None], z, 0.0), 1)
        new_top = tl.maximum(top, tl.max(tl.where((v < V)[None, :], z, float("-inf")), 1))
        keep = tl.exp(top - new_top)
        p = tl.where((v < V)[None, :], tl.exp(z - new_top[:, None]), 0.0)
        total = total * keep + tl.sum(p, 1)
        weighted = weighted * keep + tl.sum(p * z, 1)
        top = new_top
    lse = top + tl.log(total)
    tl.store(logprob_ptr + n, chosen - lse, mask=n < N)
    tl.store(entropy_ptr + n, lse - weighted / total, mask=n < N)


def row_logits(hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, temperature: float) -> torch.Tensor:
    """The same sums as in `token_logprobs_kernel`, kept as logits."""
    logits = matmul_rows(hidden_N_H.detach(), weight_V_H.detach(), torch.float32)
    return logits if temperature == 1.0 else logits.div_(temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_N_H: torch.Tensor, weight_V_H: torch.Tensor, targets_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (n, h), v = hidden_N_H.shape, weight_V_H.shape[0]
        logprob_N = hidden_N_H.new_empty(n, dtype=torch.float32)
        entropy_N = torch.empty_like(logprob_N)
        if n:
            token_logprobs_kernel[(triton.cdiv(n, BLOCKS["BLOCK_N"]),)](
                hidden_N_H, weight_V_H, targets_N, logprob_N, entropy_N, n, v, h, temperature, **BLOCKS, **OPTIONS
            )
        ctx.save_for_backward(hidden_N_H, weight_V_H, targets_N, entropy_N)
        ctx.temperature = temperature
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = max(1, BACKWARD_LOGITS // ctx.saved_tensors[1].shape[0])
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
