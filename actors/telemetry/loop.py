"""Spans of what happens to sessions after their end: grading, assembly, training.

Grading is a child of the session's root span, through the traceparent of the record that ended it. A batch has a trace
of its own; assembly and training link to the sessions whose tokens they used: a link, not a parent, because one batch
has many sessions and a session's trace is long over. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext

from odradek.actors.telemetry import identity, semconv
from odradek.actors.telemetry.spans import SpanMaker
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded

MAX_LINKS = 128
"""Links of one span; collectors cut there. The number of members stands beside them."""


def grading_span(
    maker: SpanMaker, verdict: RewardAssigned | RewardUngraded, parent: SpanContext | None, start_ns: int, end_ns: int
) -> ReadableSpan:
    """One verdict. Without a parent (the session ran untraced) it joins the session's trace all the same."""
    session = verdict.session_id
    attributes: dict[str, Any] = {
        semconv.CONVERSATION_ID: session,
        semconv.EVALUATION_NAME: f"{verdict.grader}@{verdict.grader_version}",
        semconv.GROUP_ID: verdict.group_id or None,
    }
    error = None
    if isinstance(verdict, RewardAssigned):
        attributes[semconv.EVALUATION_SCORE_VALUE] = verdict.total
        attributes[semconv.EVALUATION_SCORE_LABEL] = (
            "solved" if verdict.components.get("solved", 0.0) >= 1.0 else "unsolved"
        )
        attributes |= {semconv.COMPONENT_PREFIX + name: value for name, value in verdict.components.items()}
    else:
        attributes[semconv.EVALUATION_EXPLANATION], error = verdict.cause, "ungraded"
    step = f"grading.{verdict.grader}.{verdict.grader_version}"
    own = identity.context(session, step)
    if parent is not None:
        own = SpanContext(parent.trace_id, own.span_id, False, own.trace_flags)
    return maker.make("grading", own, parent or identity.context(session), start_ns, end_ns, attributes, error=error)


def assembly_span(maker: SpanMaker, batch: BatchAssembled, start_ns: int, end_ns: int) -> ReadableSpan:
    """From the first seal that the batch consumed (or whatever the caller knows) to its commit."""
    attributes = {
        semconv.LANE: batch.lane,
        semconv.BATCH_ID: batch.batch_id,
        semconv.MERKLE_ROOT: batch.merkle_root,
        semconv.MEMBERS: len(batch.members),
    }
    name = _batch_name(batch.batch_id)
    context = identity.context(name, "assembly")
    return maker.make(
        f"assemble batch {batch.ordinal}", context, None, start_ns, end_ns, attributes, links=_links(batch)
    )


def step_span(
    maker: SpanMaker, step: StepCompleted, batch: BatchAssembled | None, start_ns: int, end_ns: int
) -> ReadableSpan:
    """One optimiser step, beneath the assembly of its batch."""
    attributes: dict[str, Any] = {
        semconv.LANE: step.lane,
        semconv.BATCH_ID: step.batch_id,
        semconv.STEP: step.step,
        **{semconv.METRIC_PREFIX + name: value for name, value in step.metrics.items()},
    }
    name = _batch_name(step.batch_id)
    links = _links(batch) if batch is not None else []
    return maker.make(
        f"train step {step.step}",
        identity.context(name, "step"),
        identity.context(name, "assembly"),
        start_ns,
        end_ns,
        attributes,
        links=links,
    )


def _batch_name(batch_id: str) -> str:
    return f"batch:{batch_id}"


def _links(batch: BatchAssembled) -> list[Link]:
    sessions: Iterable[str] = (member.session_id for member in batch.members[:MAX_LINKS])
    return [Link(identity.context(session)) for session in sessions]
