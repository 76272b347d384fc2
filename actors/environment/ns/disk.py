"""Keeps what sandboxes write from filling the host's disk.

All sandboxes of a driver share one disk with each other and, on one machine, with the log. An rlimit bounds a file, not
a tree, and nothing an unprivileged driver has bounds a tree. So the free space is looked at often, which costs a
microsecond, and whenever it has shrunk the trees are measured: a sandbox that holds more than a sandbox may is ended,
and if the disk is nearly full the one that holds most is, one of production only where no other is large. Whoever waits
for it gets `SandboxGoneError` with the reason.

Not seen: files that were removed and are still open. Each is at most as large as the rlimit allows, and they go with
the command. A sandbox whose tree is small is never ended for them.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping

from odradek.actors.environment.errors import SandboxError
from odradek.actors.environment.ns.admission import NsConfig

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Seconds between looks at the free space. Too high: a fast disk is filled between two looks; too low: wakes for
nothing."""

STEP_BYTES = 256 * 1024 * 1024
"""Bytes by which free space shrinks before the trees are measured again. Too low: a busy broker on the same disk makes
us walk trees all the time; too high: a sandbox exceeds its part by that much."""

Measure = Callable[[], Awaitable[Mapping[str, int]]]
"""Bytes by live sandbox."""
Evict = Callable[[str, str], Awaitable[None]]
"""End a sandbox (id, reason)."""


def to_evict(
    config: NsConfig, free: int, held: Mapping[str, int], of_production: Callable[[str], bool] = lambda _: False
) -> dict[str, str]:
    """Which sandboxes must go, with the reason. Pure."""
    going = {
        name: f"its files take {size >> 20} MB, at most {config.max_disk_bytes >> 20} MB are allowed"
        for name, size in held.items()
        if size > config.max_disk_bytes
    }
    large = [name for name in held if held[name] > STEP_BYTES]
    largest = max(large, key=lambda name: (not of_production(name), held[name]), default=None)
    if not going and largest is not None and free < config.min_free_disk_bytes:
        going[largest] = (
            f"its files took {held[largest] >> 20} MB, the most that could go, when the host's disk was nearly full"
        )
    return going


async def guard(
    config: NsConfig, state_fd: int, measure: Measure, evict: Evict, of_production: Callable[[str], bool]
) -> None:
    """Runs for a driver's life."""
    measured_at = free_bytes(state_fd)
    while True:
        await asyncio.sleep(LOOK_S)
        free = free_bytes(state_fd)
        measured_at = max(measured_at, free)
        if free >= config.min_free_disk_bytes and free > measured_at - STEP_BYTES:
            continue
        measured_at = free
        try:
            for name, why in to_evict(config, free, await measure(), of_production).items():
                log.warning("sandbox %s is ended: %s", name, why)
                await evict(name, why)
        except (OSError, SandboxError):
            log.exception("the host's disk could not be looked after; trying again")


def free_bytes(state_fd: int) -> int:
    """What the driver's disk still takes."""
    disk = os.statvfs(state_fd)
    return disk.f_bavail * disk.f_frsize
