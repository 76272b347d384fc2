"""What `rows.linear` must compute, in float64 and the plainest words."""

import torch


def linear(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    """`x @ w.T` in float64."""
    return x_N_K.double() @ w_O_K.double().t()
