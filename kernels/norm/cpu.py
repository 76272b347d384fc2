"""Root-mean-square norm on CPU; backward is the formula of `norm.formula`."""

from typing import Any, cast

import torch

from odradek.kernels.norm.formula import rms_norm_backward


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
        # The mean square in float32 at least: bf16 has too few bits to add up a row.
        wide = x if x.dtype == torch.float64 else x.float()
        inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, w_H, inverse)
        return ((wide * inverse).to(x.dtype) * w_H).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w_H, inverse = ctx.saved_tensors
        return (*rms_norm_backward(x, w_H, inverse, grads[0], ctx.needs_input_grad), None)


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.api`."""
    return cast(torch.Tensor, _RmsNorm.apply(x.contiguous(), w_H, eps))
