"""The gradient of the root-mean-square norm, in plain torch for both devices.

With r = 1/rms, g = grad·w and the mean over H: dx = r·(g − x·r²·mean(g·x)), dw = Σ_rows grad·x·r.
"""

import torch


def rms_norm_backward(
    x: torch.Tensor, w_H: torch.Tensor, inverse: torch.Tensor, grad_out: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and w, each only if needed; `inverse` is r, [..., 1]."""
    grad = grad_out.to(inverse.dtype)
    normed = x.to(inverse.dtype) * inverse
    grad_w = (grad * normed).view(-1, x.shape[-1]).sum(0).to(w_H.dtype) if needed[1] else None
    if not needed[0]:
        return None, grad_w
    scaled = grad * w_H.to(inverse.dtype)
    grad_x = inverse * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_w
