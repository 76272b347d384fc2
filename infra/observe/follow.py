"""Feeds a `RunFold` from the log: once to the end, or for ever beside something else.

Consumes groups.v1, rewards.v1, batches.v1, weights.v1, weights.current.v1 and replicas.v1 from their beginnings.
Rewards are folded after the groups they belong to, so that an evaluation's task set is known. Produces nothing.
"""

from __future__ import annotations

import logging
from collections import Counter

from odradek.infra.observe.fold import RunFold
from odradek.streams import topics
from odradek.streams.envelope import Record
from odradek.streams.errors import DecodeError
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

    def __init__(self, event_log: EventLog) -> None:
        self.fold = RunFold()
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
        return self.fold

    def _apply(self, record: Record) -> None:
        try:
            event = record.event
        except DecodeError as error:
            self.undecodable[record.ref.topic] += 1
            log.debug("record set aside: %s", error)
            return
        self.fold.apply(record.ref, event.id, event.meta, event.body, record.timestamp_ms)


async def count_session_events(event_log: EventLog) -> Counter[str]:
    """Records of sessions.v1 by type, from their headers alone."""
    counts: Counter[str] = Counter()
    for partition, end in (await event_log.stable_ends(topics.SESSIONS.name)).items():
        start = await event_log.beginning(topics.SESSIONS.name, partition)
        async for record in event_log.read(topics.SESSIONS.name, partition, start, end):
            kind = next((value for name, value in record.headers if name == "ce_type"), None)
            counts[(kind or b"(none)").decode("utf-8", "backslashreplace")] += 1
    return counts
