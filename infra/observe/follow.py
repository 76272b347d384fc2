"""Feeds a `RunFold` from the log: once to the end, or for ever beside something else.

Consumes groups.v1, rewards.v1, batches.v1, weights.v1, weights.current.v1 and replicas.v1 from their beginnings.
Rewards are folded after the groups they belong to, so that an evaluation's task set is known. Produces nothing.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.lanes import LaneFolds
from odradek.infra.observe.sessions import SessionBook
from odradek.streams import topics
from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.sessions import SessionOpened
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

FOLDED = (
    topics.GROUPS.name,
    topics.REWARDS.name,
    topics.BATCHES.name,
    topics.WEIGHTS.name,
    topics.WEIGHTS_CURRENT.name,
    topics.REPLICAS.name,
)


class RunFollower:
    """Remembers how far each partition has been folded."""

    def __init__(self, event_log: EventLog, lanes: LaneFolds | None = None) -> None:
        """`lanes`: is fed beside the whole."""
        self.fold = RunFold()
        self._lanes = lanes
        self.undecodable: Counter[str] = Counter()
        self._log = event_log
        self._positions: dict[tuple[str, int], int] = {}

    async def refresh(self) -> RunFold:
        """Fold everything that has been committed since the last call.

        Ends are asked for in reverse order of reading: the group of every reward that is read has been read.
        """
        ends = {topic: await self._log.stable_ends(topic) for topic in reversed(FOLDED)}
        for topic in FOLDED:
            for partition, end in sorted(ends[topic].items()):
                start = self._positions.get((topic, partition))
                if start is None:
                    start = await self._log.beginning(topic, partition)
                async for record in self._log.read(topic, partition, start, end):
                    self._apply(record)
                self._positions[topic, partition] = max(start, end)
        self.fold.read_at(int(time.time() * 1000))
        return self.fold

    def position(self, topic: str, partition: int) -> int:
        """The first offset that has not been folded; 0 before the first refresh."""
        return self._positions.get((topic, partition), 0)

    def _apply(self, record: Record) -> None:
        try:
            event = record.event
        except UndecodableRecord as error:
            self.undecodable[record.ref.topic] += 1
            log.debug("record set aside: %s", error)
            return
        self.fold.apply(record.ref, event.id, event.meta, event.body, record.timestamp_ms)
        if self._lanes is not None:
            self._lanes.apply(record.ref, event.id, event.meta, event.body, record.timestamp_ms)


RECENT_RECORDS = 2000
"""Records before a partition's end at which a follower of what goes on now begins, unless open groups need more. Too
few misses sessions under way that belong to no group; too many delays the first picture."""


class SessionFollower:
    """Feeds a `SessionBook` from sessions.v1, the whole of it or only what is still going on. Produces nothing."""

    def __init__(self, event_log: EventLog, wanted: Callable[[SessionOpened], bool] = lambda _opened: True) -> None:
        """Sessions that are not `wanted` are passed over whole."""
        self._wanted, self._others = wanted, set[str]()
        self.book = SessionBook()
        self.undecodable = 0
        self._log = event_log
        self._positions: dict[int, int] = {}

    async def begin_recent(self, fold: RunFold) -> None:
        """Begin where the open groups' sessions begin, or a little before the end; without this call, at the start."""
        for partition, end in (await self._log.stable_ends(topics.SESSIONS.name)).items():
            floors = [
                group.sessions_floor[partition]
                for group in (fold.groups[g] for g in fold.open_groups)
                if partition < len(group.sessions_floor)
            ]
            start = max(await self._log.beginning(topics.SESSIONS.name, partition), end - RECENT_RECORDS)
            self._positions[partition] = min([start, *floors])

    async def refresh(self) -> SessionBook:
        """Fold everything that has been written since the last call."""
        for partition, end in sorted((await self._log.stable_ends(topics.SESSIONS.name)).items()):
            start = self._positions.get(partition)
            if start is None:
                start = await self._log.beginning(topics.SESSIONS.name, partition)
            async for record in self._log.read(topics.SESSIONS.name, partition, start, end):
                self._apply(record)
            self._positions[partition] = max(start, end)
        for clock in self.book.clocks.values():
            clock.reader_ms = int(time.time() * 1000)
        return self.book

    def _apply(self, record: Record) -> None:
        try:
            event = record.event
        except UndecodableRecord as error:
            self.undecodable += 1
            log.debug("record set aside: %s", error)
            return
        key = record.key or ""
        if isinstance(event.body, SessionOpened) and not self._wanted(event.body):
            self._others.add(key)
        if key not in self._others:
            self.book.apply(record.ref, key, event.id, event.meta, event.body, record.timestamp_ms)


async def count_session_events(event_log: EventLog) -> Counter[str]:
    """Records of sessions.v1 by type, from their headers alone."""
    counts: Counter[str] = Counter()
    for partition, end in (await event_log.stable_ends(topics.SESSIONS.name)).items():
        start = await event_log.beginning(topics.SESSIONS.name, partition)
        async for record in event_log.read(topics.SESSIONS.name, partition, start, end):
            kind = next((value for name, value in record.headers if name == "ce_type"), None)
            counts[(kind or b"(none)").decode("utf-8", "backslashreplace")] += 1
    return counts
