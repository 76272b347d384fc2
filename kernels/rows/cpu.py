"""Row-stable linear layer on CPU: plain torch matmul over whole 16-row tiles.

BLAS picks another inner kernel (a matrix-vector product) for one to three rows, and that one sums in another order. It
does so again at the edges of small results: with under 12 outputs and a K that is no multiple of 4, the place of a row
in its tile changes its bits. So rows, K and a small O are padded with zeros, and only the main kernel runs, whose sum
over K is the same for each row of each tile.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F

ROW_TILE = 16
"""Rows that a call is padded to. Below 4 the bits of small calls change (seen with MKL on AVX2 and AVX-512); a larger
tile wastes work in small decode steps. Part of `numerics_id`."""

INNER_TILE = 16
"""K is padded to a multiple of this. Below 4 a row's place in its tile counts (seen); models have round sizes, so it
costs them nothing."""

LEAST_OUTPUTS = 16
"""Outputs that a call is padded to. Below 12 a row's place in its tile counts (seen); a router of 8 experts pays for
16."""

COPY_BELOW = 256
"""Rows under which a ragged input is copied whole into padded memory; above, only the last tile is copied and a second
matmul runs. Too high copies megabytes for nothing, too low pays two calls where one would do."""


def matmul_rows(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    """The forward alone, without autograd: also used where a caller has its own backward."""
    outputs, inner = w_O_K.shape
    if inner % INNER_TILE or outputs < LEAST_OUTPUTS:
        extra = -inner % INNER_TILE
        w_O_K = F.pad(w_O_K, (0, extra, 0, max(0, LEAST_OUTPUTS - outputs)))
        return _matmul_whole_rows(F.pad(x_N_K, (0, extra)), w_O_K)[:, :outputs].contiguous()
    return _matmul_whole_rows(x_N_K.contiguous(), w_O_K.contiguous())


def _matmul_whole_rows(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    w_K_O = w_O_K.t()
    n, k = x_N_K.shape
    ragged = n % ROW_TILE
    if not ragged:
        return torch.mm(x_N_K, w_K_O)
    whole = n - ragged
    if n < COPY_BELOW:
        padded = x_N_K.new_zeros(whole + ROW_TILE, k)
        padded[:n] = x_N_K
        return torch.mm(padded, w_K_O)[:n]
    out = x_N_K.new_empty(whole + ROW_TILE, w_O_K.shape[0])
    torch.mm(x_N_K[:whole], w_K_O, out=out[:whole])
    last = x_N_K.new_zeros(ROW_TILE, k)
    last[:ragged] = x_N_K[whole:]
    torch.mm(last, w_K_O, out=out[whole:])
    return out[:n]


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_N_K, w_O_K)
        return matmul_rows(x_N_K, w_O_K)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_N_K, w_O_K = ctx.saved_tensors
        (grad_N_O,) = grads
        grad_x = torch.mm(grad_N_O, w_O_K) if ctx.needs_input_grad[0] else None
        grad_w = torch.mm(grad_N_O.t(), x_N_K) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w


def linear(x_N_K: torch.Tensor, w_O_K: torch.Tensor) -> torch.Tensor:
    """`x @ w.T`; see `rows.api`."""
    if not (torch.is_grad_enabled() and (x_N_K.requires_grad or w_O_K.requires_grad)):
        return matmul_rows(x_N_K, w_O_K)
    return cast(torch.Tensor, _RowLinear.apply(x_N_K, w_O_K))
