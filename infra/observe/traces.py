"""The traces of a run, rebuilt from its log: the same ids and the same spans as its actors sent, or would have sent.

Needs no collector at run time. Reads sessions.v1 once more, for the sessions that are wanted; times follow the log's
own clock. Gradings, assembly and training come from the fold.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

from opentelemetry.sdk.trace import ReadableSpan

from odradek.actors.telemetry.loop import grading_span
from odradek.actors.telemetry.spans import SessionSpans, SpanMaker
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.telemetry.batches import batch_spans
from odradek.streams import topics
from odradek.streams.errors import DecodeError
from odradek.streams.log import EventLog
from odradek.streams.ownership import OwnerRule

NS_PER_MS = 1_000_000


def newest_sessions(book: SessionBook, count: int) -> set[str]:
    """Half of them evaluations (which are few and say most), half everything else; 0 for all. Only ended ones."""
    ended = [note for note in book.sessions.values() if note.end]
    if not count:
        return {note.session_id for note in ended}
    ended.sort(key=lambda note: book.time(note, note.opened_at), reverse=True)
    evaluations = [note for note in ended if note.origin == "eval"][: (count + 1) // 2]
    others = [note for note in ended if note.origin != "eval"][: count - len(evaluations)]
    return {note.session_id for note in evaluations + others}


async def session_traces(
    event_log: EventLog, book: SessionBook, wanted: Collection[str], maker: SpanMaker
) -> AsyncIterator[list[ReadableSpan]]:
    """Session by session, as each ends on the log, its whole trace but for what happened after its end."""
    for partition, clock in sorted(book.clocks.items()):
        folds: dict[str, tuple[OwnerRule, SessionSpans, list[ReadableSpan]]] = {}
        if not clock.offsets:
            continue
        async for record in event_log.read(topics.SESSIONS.name, partition, clock.offsets[0], clock.offsets[-1] + 1):
            key = record.key or ""
            if key not in wanted:
                continue
            try:
                event = record.event
            except DecodeError:
                continue
            rule, spans, made = folds.setdefault(key, (OwnerRule(), SessionSpans(key, maker), []))
            if spans.ended or not rule.accepts(record.ref.offset, event.id, event.meta, event.body):
                continue
            made += spans.take(event.body, clock.time_at(record.ref.offset) * NS_PER_MS)
            if spans.ended:
                yield made
                made.clear()


def later_spans(fold: RunFold, wanted: Collection[str], maker: SpanMaker) -> list[ReadableSpan]:
    """Gradings of these sessions, and every batch and step."""
    spans = []
    for grading in fold.gradings:
        verdict = fold.verdicts.get(grading.session_id)
        if verdict is None or grading.session_id not in wanted:
            continue
        end = fold.clocks["rewards.v1", grading.partition].time(grading.at) * NS_PER_MS
        spans.append(grading_span(maker, verdict, None, end - int(grading.milliseconds * NS_PER_MS), end))
    return spans + batch_spans(fold, maker)
