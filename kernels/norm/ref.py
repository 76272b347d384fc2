"""What `norm.rms_norm` must compute, in float64 and the plainest words."""

import torch


def rms_norm(x: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x**2) + eps) * w` in float64."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * w_H.double()
