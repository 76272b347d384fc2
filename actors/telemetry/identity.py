"""Trace and span ids as functions of what is on the log.

A session's trace id follows from the session's id, and each span's id from the session and the step: whoever writes a
span (the owner, its successor after a crash, the reward actor, the dashboard from the log years later), it is the
same span of the same trace, and none needs to hear an id from another. Pure.
"""

from __future__ import annotations

import hashlib
import re

from opentelemetry.trace import SpanContext, TraceFlags

TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
ROOT = "session"
"""The step of a session's root span."""


def trace_id(name: str) -> int:
    """128 bits, never 0."""
    return int.from_bytes(hashlib.sha256(f"odradek:trace:{name}".encode()).digest()[:16], "big") | 1


def span_id(name: str, step: str) -> int:
    """64 bits, never 0."""
    return int.from_bytes(hashlib.sha256(f"odradek:span:{name}:{step}".encode()).digest()[:8], "big") | 1


def context(name: str, step: str = ROOT, *, remote: bool = False) -> SpanContext:
    """A sampled span of the trace of this name."""
    return SpanContext(trace_id(name), span_id(name, step), remote, TraceFlags(TraceFlags.SAMPLED))


def traceparent(session_id: str) -> str:
    """The W3C header that makes a span a child of the session's root span."""
    return f"00-{trace_id(session_id):032x}-{span_id(session_id, ROOT):016x}-01"


def parsed(header: str | None) -> SpanContext | None:
    """The span that a header names; None for a missing, malformed or all-zero one."""
    match = TRACEPARENT.match(header or "")
    if match is None:
        return None
    found = SpanContext(int(match[1], 16), int(match[2], 16), True, TraceFlags(int(match[3], 16)))
    return found if found.is_valid else None
