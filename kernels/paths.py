"""Which implementation a call takes, decided by where its tensors lie and by nothing else.

CPU tensors go to `cpu.py`, CUDA tensors to `gpu.py`. There is no environment switch, and a CUDA call that can't be
compiled raises: a quiet detour through plain torch would change the bits that `numerics_id` promises.
"""

from typing import Literal

import torch

from odradek.kernels.errors import KernelInputError, KernelUnavailableError

Path = Literal["cpu", "cuda"]


def path_of(kernel: str, *tensors: torch.Tensor | None) -> Path:
    """The path for `kernel`; every tensor given must lie on one device."""
    devices = {str(t.device) for t in tensors if t is not None}
    if len(devices) != 1:
        raise KernelInputError(
            f"{kernel}: expected all tensors on one device, found {sorted(devices)}; move them first"
        )
    kind = next(t for t in tensors if t is not None).device.type
    if kind == "cpu":
        return "cpu"
    if kind == "cuda":
        return "cuda"
    raise KernelUnavailableError(f"{kernel}: no path for device type {kind!r}; use cpu or cuda")


def require(kernel: str, condition: bool, expected: str, **found: object) -> None:
    """Raise `KernelInputError` naming what was expected and what was found, unless `condition` holds."""
    if not condition:
        seen = ", ".join(f"{name}={value}" for name, value in found.items())
        raise KernelInputError(f"{kernel}: expected {expected}; found {seen}")
