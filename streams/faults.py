"""Named fault points: the places where a crash would hurt most, so that tests can crash exactly there.

Code that commits calls `await reach("role.point")` before and after each of its commits. Nothing happens unless a test
of this process armed that point. A point is part of its module's contract: `POINTS` lists all of them, and the crash
tests go through that list, so a new one without a test is noticed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

POINTS = (
    "assembler.group_read",
    "assembler.before_commit",
    "assembler.after_commit",
    "trainer.before_publish",
    "trainer.after_publish",
    "trainer.before_commit",
    "trainer.after_commit",
    "controller.before_commit",
    "controller.after_commit",
    "session.before_append",
    "session.after_append",
    "environment.box_opened",
    "environment.call_ran",
    "reward.before_append",
    "reward.after_append",
    "notary.before_commit",
    "notary.after_commit",
    "pruning.after_record",
    "pruning.after_mark",
    "erasure.requested",
    "erasure.key_destroyed",
    "erasure.objects_removed",
    "erasure.before_done",
    "erasure.after_done",
    "snapshot.written",
    "snapshot.placed",
)
"""`before_commit` stands inside the open transaction, after its events were sent; `after_commit` before anything else
is done with the result. `trainer.after_publish`: the manifest is put, no transaction is open. The environment's two
stand where something exists or has happened that the log does not know yet. Erasure's stand between its steps, a
snapshot's before and after its rename."""

Action = Callable[[], Awaitable[None]]

_armed: dict[str, Action] = {}


class Killed(BaseException):
    """Raised at an armed point in place of the process's death: no handler of `Exception` takes it for an error."""


async def reach(point: str) -> None:
    """Does nothing, unless a test armed this point."""
    action = _armed.get(point)
    if action is not None:
        await action()


@contextmanager
def armed(point: str, action: Action) -> Iterator[None]:
    """For tests: `action` runs each time the point is reached inside the block."""
    if point not in POINTS:
        raise ValueError(f"no fault point {point!r}; there are {', '.join(POINTS)}")
    _armed[point] = action
    try:
        yield
    finally:
        del _armed[point]
