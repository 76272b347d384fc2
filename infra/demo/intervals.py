"""Intervals for solve rates: Wilson's score interval (E. B. Wilson 1927), which behaves at 0 and 1."""

from __future__ import annotations

import math

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(solved: int, count: int, z: float = Z95) -> tuple[float, float]:
    """Lower and upper bound of the rate, in [0, 1]; (0, 1) for no trials."""
    if count == 0:
        return 0.0, 1.0
    rate = solved / count
    scale = 1.0 + z * z / count
    centre = (rate + z * z / (2 * count)) / scale
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / scale
    return max(0.0, centre - half), min(1.0, centre + half)
