# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, no-any-return"
"""Row-stable linear layer in Triton.

One configuration for every N, no autotune, no split over K: a row is always summed by the same instructions in the same
order, wherever it stands. `tile_product` is that order, shared by every kernel whose logits or projections must agree.
Backward: ordinary matmuls.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

BLOCKS = {"BLOCK_N": 64, "BLOCK_O": 64, "BLOCK_K": 32}
"""Rows, outputs and depth of a tile, all in the bits. 64 rows are the least that Hopper's warp-group matmul takes."""

OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""One warp group, two tiles in flight: chosen to compile without spills (`aot_table.json`), not by measurement. Fusing
multiply and add is said aloud because triton's default for it changes after 3.9, and it is in the bits."""


@triton.jit
def tile_product(x_ptrs, x_mask, w_ptrs, w_mask, K, acc, BLOCK_K: tl.constexpr):
    """acc[n, o] + Σ_k x[n, k]·w[o, k], in ascending tiles of k; pointers stand at k = 0 of row-major x and w."""
    k_K = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        live_K = k + k_K < K
        x = tl.load(x_ptrs[:, None] + (k + k_K)[None, :], mask=x_mask[:, None] & live_K[None, :], other=0.0)
        w = tl.load(w_ptrs[:, None] + (k + k_K)[None, :], mask=w_mask[:, None] & live_K[None, :], other=0.0)
        # "ieee": the default for float32 operands is tf32, which keeps ten bits of mantissa.
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def linear_kernel(x_ptr, w_ptr, out_ptr, N, O_, K, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    o = (tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_O), tl.float32)
    acc = tile_product(x_ptr + n * K, n < N, w_ptr + o * K, o < O_, K, acc, BLOCK_K)
    out_ptrs = out_ptr + n[:, None] * O_ + o[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (o < O_)[None, :])


def matmul_rows(x_N_K: torch.Tensor, w_O_K: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The forward alone; sums in float32 and rounds once to `out_dtype`."""
    x_N_K, w_O_K = x_N_K.contiguous(), w_O_K.contiguous()
    (n, k), o = x_N_K.shape, w_O_K.shape[0]
    out = x_N_K.new_empty(n, o, dtype=out_dtype)
    if n and o:
        grid = (triton.cdiv(n, BLOCKS["BLOCK_N"]), triton.cdiv(o, BLOCKS["BLOCK_O"]))
        linear_kernel[grid](x_N_K, w_O_K, out, n, o, k, **BLOCKS, **OPTIONS)
    return out


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_N_K, w_O_K)
        return matmul_rows(x_N_K, w_O_K, x_N_K.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_N_K, w_O_K = ctx.saved_tensors
        (grad_N_O,) = grads
        grad_x = torch.mm(grad_N_O, w_O_K) if ctx.needs_input_grad[0] else None
        grad_w = torch.mm(grad_N_O.t(), x_N_K) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def linear(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    """`x @ w.T`; see `rows.api`."""
    return cast(torch.Tensor, _RowLinear.apply(x_N_K, w_O_K))
