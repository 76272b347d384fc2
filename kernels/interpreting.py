# mypy: disable-error-code="no-untyped-def"
"""Running the Triton kernels without a GPU: mends the interpreter where it is wrong for bfloat16.

For tests and for debugging on a laptop, never for results. The interpreter (`TRITON_INTERPRET=1`, set before triton is
imported) keeps bfloat16 as 16-bit integers: `tl.dot` then multiplies the bit patterns as numbers, arithmetic does the
same, and narrowing from float32 cuts the mantissa off where the hardware rounds to nearest even (triton 3.9.0, seen).
`mend_interpreter` replaces those three: dot decodes its operands, the cast rounds, arithmetic on bfloat16 is refused,
as our kernels widen to float32 first.
"""

from typing import Any

import numpy as np


def _widen(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: Any) -> Any:
    """float32 to bfloat16 bits, to nearest even; a NaN stays a NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def mend_interpreter() -> None:
    """Patch triton's interpreter in this process; once is enough, twice is harmless."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "_mended", False):
        return
    cast, dot, binary = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.binary_op

    def mended_cast(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if target == tl.bfloat16 and source == tl.float32:
            return TensorHandle(_narrow(src.data), target)
        if source == tl.bfloat16 and target == tl.float32:
            return TensorHandle(_widen(src.data), target)
        return cast(self, src, dst_type)

    def mended_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        a, b = (TensorHandle(_widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    def mended_binary(self, lhs, rhs, op):
        if tl.bfloat16 in (lhs.dtype.scalar, rhs.dtype.scalar):
            raise TypeError(
                f"{op.__name__} on bfloat16: widen to float32 first, the interpreter would add bit patterns"
            )
        return binary(self, lhs, rhs, op)

    InterpreterBuilder.cast_impl = mended_cast
    InterpreterBuilder.create_dot = mended_dot
    InterpreterBuilder.binary_op = mended_binary
    InterpreterBuilder._mended = True
