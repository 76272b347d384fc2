"""Sessions as traces: every call under its turn, one trace whoever writes it, timings that nest."""

from __future__ import annotations

import re

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes
from opentelemetry.semconv.attributes import error_attributes, service_attributes
from support.run_log import LANE, small_run
from support.session_world import FolderEnvironment, MemoryJournal, ScriptedModel, spec, template, turn

from odradek.actors.session.runner import SessionRunner
from odradek.actors.telemetry import identity, semconv
from odradek.actors.telemetry.loop import MAX_LINKS, assembly_span, grading_span, step_span
from odradek.actors.telemetry.spans import SessionSpans, SpanMaker
from odradek.streams.codec import f32, i32
from odradek.streams.events.batches import BatchAssembled, BatchMember, StepCompleted
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionOpened,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
    WeightSpan,
)

MS = 1_000_000
MAKER = SpanMaker.of("test")


def sampled(number: int) -> TurnSampled:
    return TurnSampled(
        turn=number, position=0, prompt=i32([1, 2]), completion=i32([3, 4, 5]), logprobs=f32([-1.0] * 3),
        spans=[WeightSpan(0, 7)], numerics_id="n", finish_reason="stop", queue_ms=1.0, prefill_ms=2.0, decode_ms=5.0,
    )  # fmt: skip


def calls(number: int, count: int) -> tuple[list[SessionEvent], list[SessionEvent]]:
    asked: list[SessionEvent] = [
        ToolRequested(
            call_id=f"{number}.{i}", turn=number, index=i, name="grep", arguments={"pattern": "x"}, effect="pure"
        )
        for i in range(count)
    ]
    answered: list[SessionEvent] = [
        ToolCompleted(call_id=f"{number}.{i}", turn=number, index=i, text="found", duration_ms=4.0)
        for i in range(count)
    ]
    return asked, answered


def fifty_turns() -> list[SessionEvent]:
    """50 turns of 3 parallel calls each."""
    events: list[SessionEvent] = [
        SessionOpened(session_id="s", policy="demo", group_id="g"),
        EnvironmentOpened(sandbox_id="b", driver="ns", image_digest="d"),
    ]
    for number in range(50):
        asked, answered = calls(number, 3)
        events += [sampled(number), *asked, *answered]
    return [*events, SessionCompleted(reason="done", first_offset=0, usage=Usage(turns=50))]


def feed(spans: SessionSpans, events: list[SessionEvent], start_ms: int = 1000) -> list[ReadableSpan]:
    return [span for i, event in enumerate(events) for span in spans.take(event, (start_ms + 10 * i) * MS)]


def parents(spans: list[ReadableSpan]) -> dict[str, str]:
    """Name of each span's parent, by its own name and turn."""
    names = {span.context.span_id: span.name for span in spans if span.context}
    return {span.name: names[span.parent.span_id] for span in spans if span.parent is not None}


def assert_one_tree(spans: list[ReadableSpan]) -> None:
    """One trace, one root, every parent present, children inside their parents in time."""
    by_id = {span.context.span_id: span for span in spans if span.context}
    assert len(by_id) == len(spans)
    assert {span.context.trace_id for span in spans if span.context} == {identity.trace_id("s")}
    assert [span.name for span in spans if span.parent is None] == ["session"]
    for span in spans:
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time is not None and parent.end_time is not None
            assert span.start_time is not None and span.end_time is not None
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, (span.name, parent.name)


def test_case_agent_framework_6357_150_parallel_calls_are_150_spans_each_under_its_turn_in_one_trace() -> None:
    assert_each_call_under_its_turn(feed(SessionSpans("s", MAKER), fifty_turns()))


def assert_each_call_under_its_turn(spans: list[ReadableSpan]) -> None:
    tools = [span for span in spans if span.name == "execute_tool grep"]
    assert len(tools) == 150
    turns = {span.context.span_id: span.name for span in spans if span.name.startswith("turn ") and span.context}
    assert len(turns) == 50
    for span in tools:
        assert span.parent is not None and span.attributes is not None
        assert turns[span.parent.span_id] == f"turn {span.attributes[semconv.TURN]}"
    assert_one_tree(spans)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8, 9, 101, 340])
def test_case_agent_framework_6357_over_two_actors_it_is_the_same_trace(cut: int) -> None:
    """Killed anywhere: what the two owners send together is the whole tree, no span twice."""
    events = fifty_turns()
    first = feed(SessionSpans("s", MAKER), events[:cut])
    second = SessionSpans("s", SpanMaker.of("another actor"))
    feed(second, events[:cut])  # the history, folded and not sent
    rest: list[SessionEvent] = [SessionResumed(session_id="s"), *events[cut:]]
    spans = first + feed(second, rest, start_ms=1000 + 10 * cut)
    assert_each_call_under_its_turn(spans)
    root = next(span for span in spans if span.name == "session")
    assert [event.name for event in root.events] == ["session.resumed"]


async def test_a_real_runner_is_traced_through_its_hook() -> None:
    """Parallel reads, an edit, an end: driven by the state machine itself."""
    text = template()
    model = ScriptedModel(
        [
            turn(text, ("read_file", {"path": "a"}), ("read_file", {"path": "b"})),
            turn(text, ("edit_file", {"path": "a", "old": "1", "new": "2"})),
            turn(text, done=True),
        ]
    )
    fold, got = SessionSpans("s", MAKER), list[ReadableSpan]()
    clock = iter(range(10**9, 10**12, 10**6))
    runner = SessionRunner(
        spec({"a": "1", "b": "2"}), template=text, effects={"edit_file": "workspace"}, journal=MemoryJournal(),
        engine=model, environment=FolderEnvironment(),
        observe=lambda _session, body: got.extend(fold.take(body, next(clock))),
    )  # fmt: skip
    await runner.run()
    names = sorted(span.name for span in got)
    assert names == [
        "chat demo", "chat demo", "chat demo", "environment.open", "execute_tool edit_file", "execute_tool read_file",
        "execute_tool read_file", "session", "turn 0", "turn 1", "turn 2",
    ]  # fmt: skip
    assert_one_tree(got)
    assert parents(got)["environment.open"] == "turn 0"


def test_sampling_has_the_genai_attributes() -> None:
    span = feed(SessionSpans("s", MAKER), fifty_turns()[:3])[-1]
    assert span.attributes is not None
    assert {key: span.attributes[key] for key in span.attributes if key.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "odradek",
        "gen_ai.conversation.id": "s",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo@7",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.seed": 0,
        "gen_ai.request.max_tokens": 160,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


def test_what_a_users_session_says_never_leaves_by_telemetry() -> None:
    def content(group: str) -> list[str]:
        asked, answered = calls(0, 1)
        opened = SessionOpened(session_id="s", policy="demo", group_id=group)
        spans = feed(SessionSpans("s", MAKER), [opened, sampled(0), *asked, *answered])
        return [str(value) for span in spans for value in (span.attributes or {}).values()]

    assert "found" in content("g") and '{"pattern": "x"}' in content("g")
    assert not {"found", '{"pattern": "x"}'} & set(content(""))


def test_a_failed_call_and_a_failed_session_are_errors() -> None:
    spans = SessionSpans("s", MAKER)
    asked, _ = calls(0, 1)
    failed = ToolCompleted(call_id="0.0", turn=0, index=0, text="error: no", is_error=True)
    end = SessionFailed(cause="host gone", first_offset=0)
    got = feed(spans, [SessionOpened(session_id="s", policy="demo"), sampled(0), *asked, failed, end])
    marked = [(span.name, dict(span.attributes or {})) for span in got]
    errors = {name: values[semconv.ERROR_TYPE] for name, values in marked if semconv.ERROR_TYPE in values}
    assert errors == {"execute_tool grep": "tool_error", "session": "infrastructure"}


def test_grading_is_a_child_of_the_session_through_the_kafka_header() -> None:
    verdict = RewardAssigned(
        session_id="s", group_id="g", partition=0, first_offset=0, last_offset=9, grader="hidden_tests",
        grader_version="1", components={"solved": 1.0}, total=0.9,
    )  # fmt: skip
    span = grading_span(MAKER, verdict, identity.parsed(identity.traceparent("s")), 5 * MS, 9 * MS)
    assert span.parent is not None and span.context is not None and span.attributes is not None
    assert span.parent.span_id == identity.span_id("s", identity.ROOT)
    assert span.context.trace_id == identity.trace_id("s")
    assert span.attributes[semconv.EVALUATION_SCORE_LABEL] == "solved"
    assert span.attributes["odradek.reward.solved"] == 1.0


def test_a_verdict_follows_the_header_even_of_a_foreign_trace_and_its_absence() -> None:
    verdict = RewardUngraded(
        session_id="s", group_id="g", partition=0, first_offset=0, last_offset=9, grader="g", grader_version="1",
        cause="no sandbox",
    )  # fmt: skip
    foreign = identity.parsed(f"00-{'ab' * 16}-{'cd' * 8}-01")
    span = grading_span(MAKER, verdict, foreign, 0, 1)
    assert span.context is not None and span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (int("ab" * 16, 16), int("cd" * 8, 16))
    alone = grading_span(MAKER, verdict, None, 0, 1)
    assert alone.context is not None and alone.context.trace_id == identity.trace_id("s")
    for broken in (None, "", "00-zz-1-01", f"00-{'0' * 32}-{'0' * 16}-01", f"01-{'ab' * 16}-{'cd' * 8}-01-x"):
        assert identity.parsed(broken) is None


def test_assembly_and_training_link_to_sessions_and_are_not_their_children() -> None:
    batches = [r.event.body for r in small_run(versions=1).of("batches.v1")]
    batch = next(b for b in batches if isinstance(b, BatchAssembled))
    step = next(b for b in batches if isinstance(b, StepCompleted))
    assembled, trained = assembly_span(MAKER, batch, 1, 2), step_span(MAKER, step, batch, 2, 3)
    sessions = {identity.trace_id(member.session_id) for member in batch.members}
    for span in (assembled, trained):
        assert {link.context.trace_id for link in span.links} == sessions
        assert span.context is not None and span.context.trace_id not in sessions
    assert assembled.parent is None and trained.parent is not None and assembled.context is not None
    assert trained.parent.span_id == assembled.context.span_id


def test_links_are_bounded_and_the_number_of_members_is_told() -> None:
    batch = BatchAssembled(
        batch_id="b", lane=LANE.lane, policy="p", ordinal=0, groups=[], dropped=[], layout=[], merkle_root="",
        assembler_version=1, config_offset=0, input_offset=0,
        members=[
            BatchMember(
                session_id=f"s{i}", group_id="g", partition=0, first_offset=0, last_offset=0, total=0.0, advantage=0.0,
                tokens=1, trained_tokens=1, reward=RecordRef("rewards.v1", 0, i),
            )
            for i in range(300)
        ],
    )  # fmt: skip
    span = assembly_span(MAKER, batch, 1, 2)
    assert len(span.links) == MAX_LINKS
    assert span.attributes is not None and span.attributes[semconv.MEMBERS] == 300


def test_ids_are_valid_distinct_and_those_of_the_header() -> None:
    header = identity.traceparent("s")
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", header)
    found = identity.parsed(header)
    assert found is not None and found.is_valid
    assert (found.trace_id, found.span_id) == (identity.context("s").trace_id, identity.context("s").span_id)
    assert len({identity.trace_id(f"s{i}") for i in range(1000)}) == 1000


def test_our_names_are_those_of_the_conventions() -> None:
    """A rename in a newer package shows here, not in somebody's dashboard."""
    known = {
        value
        for module in (gen_ai_attributes, messaging_attributes, error_attributes, service_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    ours = {value for name, value in vars(semconv).items() if name.isupper() and isinstance(value, str)}
    borrowed = {value for value in ours if value.startswith(("gen_ai.", "messaging.", "error.", "service."))}
    assert borrowed - known == set()
    assert len(borrowed) > 20
