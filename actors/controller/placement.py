"""Where members run and when they are handed over again. Pure.

A session's host is a function of its id, so that two controllers (one of them fenced) never start it in two places.
A member is handed over again when its host has restarted since (its boot id differs), or when it has neither been
active nor had a verdict for `LOST_AFTER_S`: the host folds the log and goes on, or finds it finished and does nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

LOST_AFTER_S = 20.0
"""Seconds a placed member may be neither active nor rewarded. Too low re-reads sessions that are merely being graded;
too high leaves a lost session idle."""


def host_of(session_id: str, hosts: int) -> int:
    """Index of the session actor that runs this session."""
    return zlib.crc32(session_id.encode()) % hosts


@dataclass(slots=True)
class _Placed:
    boot_id: str
    last_seen: float


@dataclass(slots=True)
class Placer:
    """Remembers what was handed to whom, over a fixed number of hosts."""

    hosts: int
    _placed: dict[str, _Placed] = field(default_factory=dict)

    def due(
        self, members: Iterable[str], boots: Mapping[int, str], active: Mapping[int, frozenset[str]], now: float
    ) -> list[str]:
        """Members to hand over now. `boots` and `active` are by host; to a host that did not answer nothing is
        handed over."""
        due = []
        for member in members:
            host = host_of(member, self.hosts)
            if host not in boots:
                continue
            placed = self._placed.get(member)
            if member in active.get(host, frozenset()):
                self._placed[member] = _Placed(boots[host], now)
            elif placed is None or placed.boot_id != boots[host] or now - placed.last_seen > LOST_AFTER_S:
                due.append(member)
        return due

    def handed_over(self, member: str, boot_id: str, now: float) -> None:
        """The member is its host's now."""
        self._placed[member] = _Placed(boot_id, now)

    def forget(self, keep: Iterable[str]) -> None:
        """Drop members that no longer need a place."""
        wanted = set(keep)
        self._placed = {member: placed for member, placed in self._placed.items() if member in wanted}
