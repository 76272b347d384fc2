"""What the harness does inside an actor's process. Sent by value: the actor need not be able to import the tests."""

from __future__ import annotations


def die_at(point: str, nth: int) -> None:
    """This process kills itself the nth time it reaches the named fault point."""
    import os
    import signal

    from odradek.streams import faults

    left = [nth]

    async def die() -> None:
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    faults._armed[point] = die


def move_clock(seconds: float) -> None:
    """This process's wall clock is wrong by so much from now on; 0 puts it right. Monotonic clocks are not touched, as
    the kernel does not either when somebody sets the time."""
    import time

    true = getattr(time.time, "true_clock", time.time)

    def wrong() -> float:
        return float(true()) + seconds

    wrong.true_clock = true  # type: ignore[attr-defined]
    time.time = true if seconds == 0 else wrong
