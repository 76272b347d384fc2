"""Lossless weight deltas: what changed between two published states, bit by bit.

A tensor's delta is the XOR of the bit patterns, its bytes grouped by significance (the high bytes of nearby weights
hardly differ and make long runs of zeros), compressed by zstd; unchanged tensors are left out. Applying it to the very
base gives the very result: `apply` checks the digest of the base before and of the result after, and refuses with what
is wanted. A delta never applies to something merely close.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from odradek.actors.inference.weights import state_digest
from odradek.actors.trainer.errors import CheckpointError, DeltaBaseError

ZSTD_LEVEL: Final = 3
"""Higher levels were not worth their time on mantissa noise; the zeros compress at any."""


class DeltaInfo(msgspec.Struct, frozen=True):
    """What a delta applies to and what comes out, by `state_digest`."""

    base_version: int
    base_digest: str
    result_digest: str


class _Tensor(msgspec.Struct, frozen=True, array_like=True):
    name: str
    data: bytes


def make(base: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> bytes:
    """The delta from `base` to `result`, which have the same tensors; deterministic."""
    odd = sorted(n for n in {*base, *result} if n not in base or n not in result or not _alike(base[n], result[n]))
    if odd:
        raise CheckpointError(f"no delta between states of other shapes: {odd[0]} ({len(odd)} tensors); put it whole")
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    out = []
    for name in sorted(base):
        difference = _bytes(base[name]) ^ _bytes(result[name])
        if difference.any():
            grouped = difference.reshape(-1, base[name].element_size()).T.tobytes()
            out.append(_Tensor(name, compressor.compress(grouped)))
    return msgspec.msgpack.encode(out)


def apply(
    base: Mapping[str, Tensor], delta: bytes, info: DeltaInfo, held_version: int | None = None
) -> dict[str, Tensor]:
    """The state that `delta` leads to; `base` is left as it is.

    Raises `DeltaBaseError` when `base` is not what the delta was made from, `CheckpointError` for a damaged delta.
    """
    found = state_digest(base)
    if found != info.base_digest:
        held = "" if held_version is None else f" (version {held_version})"
        raise DeltaBaseError(
            f"the delta applies to version {info.base_version} with digest {info.base_digest}, held is {found}{held}; "
            f"fetch version {info.base_version} first",
            wanted=info.base_digest,
        )
    state = dict(base)
    try:
        for part in msgspec.msgpack.decode(delta, type=list[_Tensor]):
            state[part.name] = _patched(base[part.name], part.data)
    except (msgspec.DecodeError, zstandard.ZstdError, KeyError, ValueError) as e:
        raise CheckpointError(f"the delta on version {info.base_version} is damaged: {e}; fetch it again") from e
    result = state_digest(state)
    if result != info.result_digest:
        raise CheckpointError(
            f"the delta on version {info.base_version} leads to digest {result}, expected {info.result_digest}; "
            "fetch it again"
        )
    return state


def _patched(base: Tensor, data: bytes) -> Tensor:
    size = base.element_size()
    grouped = zstandard.ZstdDecompressor().decompress(data, max_output_size=base.nbytes)
    difference = np.frombuffer(grouped, np.uint8).reshape(size, -1).T.reshape(-1)
    patched = torch.from_numpy(_bytes(base) ^ difference)
    return patched.view(base.dtype).reshape(base.shape)


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape


def _bytes(t: Tensor) -> NDArray[np.uint8]:
    flat: NDArray[np.uint8] = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat
