"""Through the real exporter to a collector: nothing lost to one giant, nothing sent or imported when off."""

from __future__ import annotations

import subprocess
import sys

from opentelemetry.sdk.trace import ReadableSpan
from support.collector import attributes, collecting

from odradek.actors.telemetry import identity, semconv
from odradek.actors.telemetry.exporter import Sink, otlp_processor, traces_url
from odradek.actors.telemetry.spans import SpanMaker
from odradek.actors.telemetry.tracing import ActiveTracing, Tracing
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardUngraded
from odradek.streams.events.sessions import (
    EnvironmentClosed,
    SessionCompleted,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    Usage,
)

MAKER = SpanMaker.of("session-0")
OPENED = SessionOpened(session_id="s", policy="demo", group_id="g")
END = SessionCompleted(reason="done", first_offset=0, usage=Usage())


def span(number: int, **values: object) -> ReadableSpan:
    context = identity.context("s", f"call.{number}")
    return MAKER.make(f"execute_tool {number}", context, identity.context("s"), 1000, 2000, values)


def test_case_otel_collector_6046_20_small_spans_and_a_giant_one_all_arrive_and_the_giants_size_is_told() -> None:
    with collecting() as collector:
        sink = Sink(otlp_processor(collector.endpoint))
        for number in range(20):
            sink(span(number, output="ok", arguments={"path": "a"}, nothing=None))
        sink(span(20, output="x" * 6_000_000))
        assert sink.flush()
        sink.close()
    assert collector.refused == 0
    assert len(collector.spans) == 21
    giant = attributes(collector.named("execute_tool 20")[0])
    assert giant["output.original_size"] == 6_000_000 and len(str(giant["output"])) < 1_000_000
    assert attributes(collector.named("execute_tool 7")[0]) == {"output": "ok", "arguments": '{"path": "a"}'}


def test_even_a_batch_of_giants_is_no_request_that_a_collector_refuses() -> None:
    values = {f"k{i}": "𝄞" * 100_000 for i in range(12)}
    with collecting() as collector:
        sink = Sink(otlp_processor(collector.endpoint))
        for number in range(200):
            sink(span(number, **values))
        assert sink.flush()
        sink.close()
    assert (collector.refused, len(collector.spans)) == (0, 200)


def test_two_actors_and_a_grader_make_one_trace() -> None:
    with collecting() as collector:
        first = Tracing.of(collector.endpoint, "session-0")
        second = Tracing.of(collector.endpoint, "session-1")
        reward = Tracing.of(collector.endpoint, "reward-0")
        assert first.observe is not None and second.observe is not None and second.traceparent is not None
        first.observe("s", OPENED)
        second.restore("s", [(0, "e", Meta(time_ms=1_790_000_000_000), OPENED)])
        asked = ToolRequested(call_id="0.0", turn=0, index=0, name="grep", arguments={}, effect="pure")
        second.observe("s", asked)
        second.observe("s", ToolCompleted(call_id="0.0", turn=0, index=0, text="x"))
        second.observe("s", END)
        second.observe("s", EnvironmentClosed(sandbox_id="b"))
        verdict = RewardUngraded(
            session_id="s", group_id="g", partition=0, first_offset=0, last_offset=9, grader="g", grader_version="1",
            cause="x",
        )  # fmt: skip
        reward.grading(second.traceparent("s"), verdict, 1)
        for tracing in (first, second, reward):
            tracing.close()
    assert sorted(s.name for s in collector.spans) == ["execute_tool grep", "grading", "session"]
    assert {s.trace_id for s in collector.spans} == {identity.trace_id("s").to_bytes(16, "big")}


def test_an_unreachable_collector_disturbs_nobody() -> None:
    tracing = Tracing.of("http://127.0.0.1:9", "session-0")
    assert tracing.observe is not None
    tracing.observe("s", OPENED)
    tracing.observe("s", END)
    assert isinstance(tracing, ActiveTracing) and tracing._sessions == {}


def test_an_error_in_a_span_is_not_the_sessions_error() -> None:
    class Broken:
        def __call__(self, _span: ReadableSpan) -> None:
            raise OSError("disk full")

    tracing = ActiveTracing(MAKER, Broken())  # type: ignore[arg-type]
    assert tracing.observe is not None
    tracing.observe("s", OPENED)
    tracing.observe("s", END)
    assert tracing.traceparent is not None and tracing.traceparent("s") == identity.traceparent("s")


def test_off_means_no_hook_no_header_and_no_sdk() -> None:
    code = (
        "import sys; from odradek.actors.telemetry.tracing import Tracing; t = Tracing.of('', 'session-0'); "
        "assert t.observe is None and t.traceparent is None; t.restore('s', []); t.close(); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'requests')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_address_is_a_base_or_the_whole() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    assert semconv.SERVICE_NAME in MAKER.resource.attributes
