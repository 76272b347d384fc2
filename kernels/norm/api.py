"""Root-mean-square norm: `x / sqrt(mean(x**2) + eps) * w` over the last dimension (Zhang and Sennrich 2019).

Promise: a row's bits do not depend on the other rows, so decode and training agree. Leading dimensions are free: pass
`[N, H]` for a layer, `[N, heads, D]` for per-head query and key norm. The mean and the root are float32 at least.
"""

import torch

from odradek.kernels.paths import path_of, require


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """Normed `x`, same shape and dtype; differentiable in `x` and `w_H`."""
    require(
        "norm.rms_norm",
        w_H.dim() == 1 and x.dim() >= 1 and x.shape[-1] == w_H.shape[0],
        "x [..., H] and w [H]",
        x=tuple(x.shape),
        w=tuple(w_H.shape),
    )
    if path_of("norm.rms_norm", x, w_H) == "cpu":
        from odradek.kernels.norm import cpu

        return cpu.rms_norm(x, w_H, eps)
    from odradek.kernels.norm import gpu

    return gpu.rms_norm(x, w_H, eps)
