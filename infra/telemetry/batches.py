"""Spans of assembly and training, sent by the process that follows the log.

Neither the assembler nor the trainer sends them: what they would say is on the log, batch and step, and a follower
says it for both, once a batch and once a step of its own time. Off without an endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odradek.infra.observe.fold import RunFold

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from odradek.actors.telemetry.exporter import Sink
    from odradek.actors.telemetry.spans import SpanMaker

NS_PER_MS = 1_000_000
SERVICE = "loop"


class BatchSpans:
    """Remembers what has been sent."""

    def __init__(self, maker: SpanMaker | None, sink: Sink | None) -> None:
        self._maker = maker
        self._sink = sink
        self._assembled = 0
        self._trained = 0

    @classmethod
    def of(cls, endpoint: str) -> BatchSpans:
        """For a deployment's `otlp_endpoint`."""
        if not endpoint:
            return cls(None, None)
        from odradek.actors.telemetry.exporter import Sink, otlp_processor
        from odradek.actors.telemetry.spans import SpanMaker

        return cls(SpanMaker.of(SERVICE), Sink(otlp_processor(endpoint)))

    def skip(self, fold: RunFold) -> None:
        """What was on the log before is not sent again."""
        self._assembled, self._trained = len(fold.batches), len(fold.steps)

    def send(self, fold: RunFold) -> int:
        """Send what is new; returns how many spans."""
        if self._maker is None or self._sink is None:
            return 0
        spans = batch_spans(fold, self._maker, self._assembled, self._trained)
        for span in spans:
            self._sink(span)
        self.skip(fold)
        return len(spans)

    def close(self) -> None:
        """Send what waits."""
        if self._sink is not None:
            self._sink.close()


def batch_spans(fold: RunFold, maker: SpanMaker, assembled: int = 0, trained: int = 0) -> list[ReadableSpan]:
    """Spans of all batches and steps after the first so many."""
    from odradek.actors.telemetry.loop import assembly_span, step_span

    spans = []
    for batch in list(fold.batches.values())[assembled:]:
        start, end = fold.assembling_since(batch), fold.batch_times[batch.batch_id]
        spans.append(assembly_span(maker, batch, start * NS_PER_MS, end * NS_PER_MS))
    for event, step in list(zip(fold.step_events, fold.steps, strict=True))[trained:]:
        end_ns = step.time_ms * NS_PER_MS
        start_ns = end_ns - int(step.seconds * 1000) * NS_PER_MS
        spans.append(step_span(maker, event, fold.batches.get(event.batch_id), start_ns, end_ns))
    return spans
