"""Deterministic sampling: the token of (row of logits, temperature, seed, position), and of nothing else.

The uniform number is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; checked against
the authors' known answers) with the session's seed as key and the absolute session position as counter: no state, so a
token does not depend on what was sampled before it, on the batch, or on how often a step was retried. The token is the
inverse of the row's cumulative distribution in float64. Everything is elementwise or a sequential sum along one row in
numpy, so a row's result has the same bits in a batch of 1 and of 96 (torch's vectorised tails do not promise that).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Philox4x32-10 of each lane; every word is a uint64 array holding 32 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seed_N: U64, position_N: U64) -> F64:
    """One number of [0, 1) with 53 random bits for each (seed, position)."""
    zero = np.zeros_like(position_N)
    w0, w1, _, _ = philox4x32((position_N & _LOW, position_N >> _32, zero, zero), (seed_N & _LOW, seed_N >> _32))
    return ((w0 << np.uint64(21)) | (w1 >> np.uint64(11))).astype(np.float64) * 2.0**-53


def sample(
    logits_NV: npt.NDArray[np.float32], temperature_N: F64, seed_N: U64, position_N: U64
) -> tuple[I64, npt.NDArray[np.bool_]]:
    """Sampled ids, and which rows were fit to sample from (finite maximum, no NaN); temperature 0 is the argmax.

    A token of probability 0 (logit -inf) is never returned from a fit row.
    """
    greedy_N = logits_NV.argmax(axis=1)
    top_N = logits_NV[np.arange(len(greedy_N)), greedy_N].astype(np.float64)
    scale_N = np.where(temperature_N > 0, temperature_N, 1.0)
    with np.errstate(invalid="ignore"):
        z_NV = logits_NV.astype(np.float64)
        z_NV -= top_N[:, None]
        z_NV /= scale_N[:, None]
        np.exp(z_NV, out=z_NV)
        cdf_NV = np.cumsum(z_NV, axis=1)
        total_N = cdf_NV[:, -1].copy()
        fit_N = np.isfinite(top_N) & np.isfinite(total_N)
        target_N = uniforms(seed_N, position_N) * total_N
        drawn_N = (cdf_NV <= target_N[:, None]).sum(axis=1)
        if drawn_N.max(initial=0) == cdf_NV.shape[1]:
            # u * total was rounded up to total itself: the last token with a probability is the answer.
            drawn_N = np.minimum(drawn_N, (cdf_NV < total_N[:, None]).sum(axis=1))
    token_N = np.where(temperature_N > 0, drawn_N, greedy_N)
    return token_N.astype(np.int64), fit_N
