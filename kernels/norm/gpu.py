# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Root-mean-square norm in Triton: one program a row, the whole row in registers.

Backward is the plain torch formula of `norm.formula`.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl

from odradek.kernels.norm.formula import rms_norm_backward
from odradek.kernels.paths import require

MAX_WIDTH = 16384
"""The widest row that one program holds: 64 KiB in float32. Wider rows would spill; none is known in our models."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
"""Fixed for all widths: the number of warps decides the order of the sum, and fusion (see `rows.gpu`) its rounding."""


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, out_ptr, inverse_ptr, H, eps, BLOCK_H: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    # Rounded to the row's dtype before the weight, as Qwen3 and Llama do.
    normed = (x * inverse).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * H + h, (normed * w).to(out_ptr.dtype.element_ty), mask=h < H)
    tl.store(inverse_ptr + row, inverse)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        require("norm.rms_norm", width <= MAX_WIDTH, f"rows of at most {MAX_WIDTH}", width=width)
        rows = x.numel() // max(width, 1)
        out = torch.empty_like(x)
        inverse = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        if rows:
            block = triton.next_power_of_2(width)
            rms_norm_kernel[(rows,)](x, w_H, out, inverse, width, eps, BLOCK_H=block, **OPTIONS)
        ctx.save_for_backward(x, w_H, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w_H, inverse = ctx.saved_tensors
        return (*rms_norm_backward(x, w_H, inverse, grads[0], ctx.needs_input_grad), None)


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.api`."""
    return cast(torch.Tensor, _RmsNorm.apply(x.contiguous(), w_H.contiguous(), eps))
