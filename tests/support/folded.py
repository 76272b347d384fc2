"""Folds a `RunLog` without a broker, as the followers do with one."""

from __future__ import annotations

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.follow import FOLDED
from odradek.infra.observe.lanes import LaneFolds
from odradek.infra.observe.sessions import SessionBook
from support.run_log import RunLog


def lanes_of(*logs: RunLog) -> LaneFolds:
    """The lanes of logs that are read as one: topic by topic, partition by partition."""
    lanes = LaneFolds()
    for topic in FOLDED:
        for record in sorted((record for log in logs for record in log.of(topic)), key=lambda record: record.ref):
            event = record.event
            lanes.apply(record.ref, event.id, event.meta, event.body, record.timestamp_ms)
    return lanes


def folded(log: RunLog) -> tuple[RunFold, SessionBook]:
    """Groups before rewards, partition by partition."""
    fold, book = RunFold(), SessionBook()
    for topic in FOLDED:
        for record in sorted(log.of(topic), key=lambda record: record.ref):
            event = record.event
            fold.apply(record.ref, event.id, event.meta, event.body, record.timestamp_ms)
    for record in sorted(log.of("sessions.v1"), key=lambda record: record.ref):
        event = record.event
        book.apply(record.ref, record.key or "", event.id, event.meta, event.body, record.timestamp_ms)
    return fold, book
