"""A linear layer whose row bits do not depend on the batch.

Promise: the bits of `linear(x, w)[i]` are a function of `x[i]` and `w` alone: not of how many rows there are, where row
i stands, or what the other rows hold. That is what makes a decode step and a training forward comparable bit for bit.
It holds on one device, dtype, thread count and library build (`numerics.numerics_id`). Gradients are ordinary matmuls
and carry no such promise.

Dimensions: N rows, K inputs, O outputs.
"""

import torch

from odradek.kernels.paths import path_of, require


def linear(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    """`x @ w.T` with row-stable bits; differentiable in both arguments."""
    require(
        "rows.linear",
        x_N_K.dim() == 2 and w_O_K.dim() == 2 and x_N_K.shape[1] == w_O_K.shape[1] and x_N_K.dtype == w_O_K.dtype,
        "x [N, K] and w [O, K] of one dtype",
        x=tuple(x_N_K.shape),
        w=tuple(w_O_K.shape),
        x_dtype=x_N_K.dtype,
        w_dtype=w_O_K.dtype,
    )
    if path_of("rows.linear", x_N_K, w_O_K) == "cpu":
        from odradek.kernels.rows import cpu

        return cpu.linear(x_N_K, w_O_K)
    from odradek.kernels.rows import gpu

    return gpu.linear(x_N_K, w_O_K)
