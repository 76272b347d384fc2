"""Sending spans to an OTLP/HTTP collector, from a thread of its own.

Guarantees: nothing here waits for the collector or raises because of it: a full queue drops spans, and says so in the
process's log. A request stays small, because spans are bounded (`attributes.py`) and few go together. Credentials come
from OTEL_EXPORTER_OTLP_HEADERS, which the exporter reads itself; they are never configuration of ours.
Not promised: that the last second's spans survive a kill. Whatever is missing can be rebuilt from the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor

BATCH = 64
"""Spans in one request. Too few: a request for each turn. Too many: a request above what a collector accepts."""
QUEUE = 8192
"""Spans that wait for a slow collector; more are dropped. About 60 MB if every one is as large as can be."""
DELAY_MS = 1000
"""Milliseconds a span waits for company. Higher loses more when a process is killed."""
TIMEOUT_S = 10.0
"""Seconds one request may take."""


def traces_url(endpoint: str) -> str:
    """Where a collector at this base address takes traces."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def otlp_exporter(
    endpoint: str, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> OTLPSpanExporter:
    """A client of a collector. One on this machine is never asked through a proxy."""
    session = requests.Session()
    session.trust_env = urlsplit(endpoint).hostname not in ("127.0.0.1", "localhost", "::1")
    return OTLPSpanExporter(
        endpoint=traces_url(endpoint), headers=headers, timeout=timeout_s, compression=Compression.Gzip, session=session
    )


def otlp_processor(endpoint: str) -> SpanProcessor:
    """A queue and its sending thread."""
    return BatchSpanProcessor(
        otlp_exporter(endpoint), max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS, max_export_batch_size=BATCH
    )


class Sink:
    """Where finished spans go."""

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor

    def __call__(self, span: ReadableSpan) -> None:
        self._processor.on_end(span)

    def flush(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Send what waits; False if that took too long."""
        return self._processor.force_flush(int(timeout_s * 1000))

    def close(self) -> None:
        """Send what waits and end the thread."""
        self._processor.shutdown()
