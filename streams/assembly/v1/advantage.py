"""Group-relative advantages, in arithmetic that repeats on any host.

float64 with `math.fsum`, division and square root, rounded once to float32 (IEEE 754): no numpy or torch sums, whose
order of addition depends on the machine. Deviations from the mean below the floor count as zero, because seven equal
rewards do not give exactly zero.

- dr_grpo (Liu et al. 2025, "Understanding R1-Zero-Like Training"): a_i = r_i - mean(r)
- grpo (Shao et al. 2024, DeepSeekMath): a_i = (r_i - mean(r)) / (std(r) + 1e-6), population standard deviation
- rloo (Ahmadian et al. 2024): a_i = r_i - mean of the others = n / (n - 1) * (r_i - mean(r))
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

GRPO_EPSILON = 1e-6
"""Added to the standard deviation. Too low blows up nearly flat groups; too high shrinks every advantage."""


def round_f32(value: float) -> float:
    """The nearest float32, as a float. Raises OverflowError beyond float32's range."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def deviations(rewards: Sequence[float], floor: float) -> list[float]:
    """r - mean(r) in float64; magnitudes below `floor` become 0."""
    mean = math.fsum(rewards) / len(rewards)
    return [0.0 if abs(r - mean) < floor else r - mean for r in rewards]


def advantages(rewards: Sequence[float], method: str, floor: float) -> list[float]:
    """One float32-representable advantage a member. Fewer than two members have nothing to compare: all zero.

    Raises ValueError for an unknown method or a reward that is not finite.
    """
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    count = len(rewards)
    if count < 2:
        return [0.0] * count
    centred = deviations(rewards, floor)
    match method:
        case "dr_grpo":
            scaled = centred
        case "grpo":
            std = math.sqrt(math.fsum(d * d for d in centred) / count)
            scaled = [d / (std + GRPO_EPSILON) for d in centred]
        case "rloo":
            scaled = [d * count / (count - 1) for d in centred]
        case _:
            raise ValueError(f"unknown advantage {method!r}; one of dr_grpo, grpo, rloo")
    return [round_f32(a) for a in scaled]


def spread(values: Sequence[float], floor: float) -> bool:
    """Whether a reward component differs inside a group by more than the floor."""
    return any(deviations(values, floor)) if len(values) > 1 else False
