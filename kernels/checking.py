"""How a kernel's result is compared, and the three ways to run the kernels; the checks themselves are in `checks`."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from odradek.kernels.errors import KernelError

SHOWN = 5
"""Differing elements printed; enough to see a pattern (a last row, a tile border), few enough to read."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|found − expected| ≤ absolute + relative · |expected|, for inputs and outputs of the order of 1."""

    relative: float
    absolute: float


TOLERANCES = {
    torch.float32: Tolerance(1e-5, 2e-5),
    torch.bfloat16: Tolerance(2e-2, 4e-2),
}
"""float32: 24 bits, sums of a few hundred products of order 1: some 1e-6, with a factor of ten for cancellation.
bfloat16: 8 bits, so half a unit is 2e-3 of a value; logits of up to 4 and hidden activations are rounded on the way
(4e-2), then the result once more. Tighter fails on correct kernels, looser hides a lost tile border."""

GRADIENT_SLACK = 4.0
"""Gradients pass two or three roundings more than outputs and sum over rows."""


class MismatchError(KernelError, AssertionError):
    """A kernel's result is not what its reference says. Explain or mend it; never loosen the tolerance to pass."""


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> None:
    """Raise `MismatchError` with count, worst and first few differing elements, unless all are within tolerance."""
    if found.shape != expected.shape:
        raise MismatchError(f"{name}: expected shape {tuple(expected.shape)}, found {tuple(found.shape)}")
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    bad = ~((found - expected).abs() <= tolerance.absolute + tolerance.relative * expected.abs())
    if not bad.any():
        return
    places = bad.nonzero()
    first = "; ".join(
        f"{tuple(place)}: {found[tuple(place)]:.6g} for {expected[tuple(place)]:.6g}"
        for place in places[:SHOWN].tolist()
    )
    worst = float((found - expected).abs().nan_to_num(float("inf")).max())
    raise MismatchError(
        f"{name}: {len(places)} of {bad.numel()} elements differ, worst by {worst:.3g}, allowed {tolerance};"
        f" first {first}"
    )


def same_bits(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `MismatchError` unless both are equal bit for bit."""
    compare(name, found, expected, Tolerance(0.0, 0.0))


@dataclass(frozen=True)
class Kernels:
    """The public functions of one path, with the same signatures as each `api.py`."""

    device: torch.device
    linear: Callable[..., torch.Tensor]
    rms_norm: Callable[..., torch.Tensor]
    token_logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    row_logits: Callable[..., torch.Tensor]
    expert_layer: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attend_causal: Callable[..., torch.Tensor]
    attend_paged: Callable[..., torch.Tensor]


def api_kernels(device: str) -> Kernels:
    """The kernels as callers get them: the device chooses the path."""
    from odradek.kernels.attention import api as attention
    from odradek.kernels.logprob import api as logprob
    from odradek.kernels.moe import api as moe
    from odradek.kernels.norm import api as norm
    from odradek.kernels.rows import api as rows

    return Kernels(
        torch.device(device),
        rows.linear,
        norm.rms_norm,
        logprob.token_logprobs,
        logprob.row_logits,
        moe.expert_layer,
        attention.attend_causal,
        attention.attend_paged,
    )


def interpreted_kernels() -> Kernels:
    """The Triton kernels run by triton's interpreter on CPU tensors; `TRITON_INTERPRET=1` must be set already."""
    if os.environ.get("TRITON_INTERPRET") != "1" or "triton" in sys.modules:
        raise KernelError("interpreter: set TRITON_INTERPRET=1 and start a new process; triton reads it when imported")
    from odradek.kernels.interpreting import mend_interpreter

    mend_interpreter()
    from odradek.kernels.attention import gpu as attention
    from odradek.kernels.logprob import gpu as logprob
    from odradek.kernels.moe import gpu as moe
    from odradek.kernels.norm import gpu as norm
    from odradek.kernels.rows import gpu as rows

    def experts(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return moe.expert_layer(*arguments, *[None] * (7 - len(arguments)))

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return attention.attend_causal(q, k, v, tuple(starts.tolist()))

    return Kernels(
        torch.device("cpu"),
        rows.linear,
        norm.rms_norm,
        logprob.token_logprobs,
        logprob.row_logits,
        experts,
        causal,
        attention.attend_paged,
    )
