"""One budget of time for a whole operation: each step asks what remains, so that the sum stays bounded."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """Counts down from `seconds` on the monotonic clock."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._started = clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.seconds - self.elapsed)

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining <= 0.0
