"""Errors of the kernels room.

A kernel never retries and never changes path by itself, so every error here is terminal for the call:
the caller passed something that can't be computed, or the machine lacks the unit that the call asked for.
Messages carry shapes, dtypes and devices, never values.
"""


class KernelError(Exception):
    """Base of everything that `odradek.kernels` raises on purpose."""


class KernelInputError(KernelError):
    """Shapes, dtypes or devices do not fit together. Mend the call; repeating it gives the same error."""


class KernelUnavailableError(KernelError):
    """The device's own path can't run here. Never answered by another path: move the tensors or mend the host."""
