"""What the notary chains, and when it makes a round.

Left out: compacted topics, because the broker removes records there by design, so that nothing could be re-read (both
are folds of kept ones: weights.current.v1 of weights.v1, replicas.v1 of what replicas report again); and
audit.anchors.v1 itself, whose records are bound to each other by `previous` and `before`, signed, and in the vault.
"""

from __future__ import annotations

from collections.abc import Mapping

from odradek.streams import topics
from odradek.streams.admin import existing
from odradek.streams.audit.anchors import Place
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.log import EventLog
from odradek.streams.topics import Cleanup


def audited(bare: str) -> bool:
    """Whether a topic is chained."""
    row = topics.declared(bare)
    return row.cleanup is Cleanup.KEEP and row is not topics.AUDIT_ANCHORS


async def audited_topics(event_log: EventLog) -> list[str]:
    """The topics on the broker that are chained, tenants' copies included."""
    return [topic for topic in await existing(event_log.config) if audited(topic)]


class Due:
    """When the next round is to be made. Pure: it is told the time and how many records wait."""

    def __init__(self, settings: AuditSettings) -> None:
        self._settings = settings
        self._since: float | None = None

    def __call__(self, now: float, waiting: Mapping[Place, int]) -> bool:
        """`waiting`: offsets of each partition not yet anchored. True when one has enough, or some wait long enough."""
        most = max(waiting.values(), default=0)
        if most <= 0:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        due = most >= self._settings.interval_records or now - self._since >= self._settings.interval_s
        if due:
            self._since = None
        return due
