"""Root-mean-square norm on CPU.

Backward, with r = 1/rms, g = grad·w and the mean over H: dx = r·(g − x·r²·mean(g·x)), dw = Σ_rows grad·x·r.
"""

from typing import Any, cast

import torch


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        # The mean square in float32: bf16 has too few bits to add up a row.
        inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, w_H, inverse)
        return (wide * inverse).to(x.dtype) * w_H

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, w_H, inverse = ctx.saved_tensors
        wide = x.to(inverse.dtype)
        grad = grads[0].to(inverse.dtype)
        normed = wide * inverse
        grad_w = (grad * normed).flatten(0, -2).sum(0).to(w_H.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_w, None
        scaled = grad * w_H.to(inverse.dtype)
        grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_w, None


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """See `norm.api`."""
    return cast(torch.Tensor, _RmsNorm.apply(x.contiguous(), w_H, eps))
