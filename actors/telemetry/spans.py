"""A session's spans as a fold of its events: session, turns, and in each turn its sampling and its tool calls.

    session                          invoke_agent, from session.opened to its end
      turn N                         from the first sampled token to the last result of its calls
        chat POLICY                  queue, prefill and decode of that turn
        environment.open             where the first call had to wait for a sandbox
        execute_tool NAME            one a call, from its intent (or the sandbox) on, as long as it took

Guarantees: every call is one span under its own turn, whether its calls ran together or not and whichever owner logs
them (ids follow from the log, `identity.py`); children lie inside their parents in time; a span is handed out once,
when it is over. Content (arguments, results) goes along only where the session belongs to a group of ours: what a
user's session says never leaves by telemetry. Pure: the caller brings the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind
from opentelemetry.trace.status import Status, StatusCode

from odradek.actors.telemetry import identity, semconv
from odradek.actors.telemetry.attributes import Redact, clean, utf8
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionOpened,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)

NS_PER_MS = 1_000_000
MAX_NAME = 200
"""Characters of a span's name."""
INT32_BYTES = 4
SCOPE = InstrumentationScope("odradek")


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """What all spans of a process share."""

    resource: Resource
    redact: Redact = str

    @classmethod
    def of(cls, service: str, redact: Redact = str) -> SpanMaker:
        """For the process of this name."""
        return cls(Resource({semconv.SERVICE_NAME: service}), redact)

    def make(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Any],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str | None = None,
        links: Sequence[Link] = (),
        events: Sequence[SpanEvent] = (),
    ) -> ReadableSpan:
        """A finished span."""
        extra = {semconv.ERROR_TYPE: error} if error is not None else {}
        return ReadableSpan(
            name=utf8(name[:MAX_NAME]).decode(),
            context=context,
            parent=parent,
            resource=self.resource,
            attributes=clean({**attributes, **extra}, self.redact),
            events=events,
            links=links,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error is not None else Status(StatusCode.UNSET),
            start_time=start_ns,
            end_time=max(start_ns, end_ns),
            instrumentation_scope=SCOPE,
        )


@dataclass(slots=True)
class _Turn:
    body: TurnSampled
    start_ns: int
    sampled_ns: int
    end_ns: int
    calls: int = 0


@dataclass(slots=True)
class SessionSpans:
    """The fold. `take` gives the spans that an event finishes."""

    session_id: str
    maker: SpanMaker
    opened: SessionOpened | None = None
    ended: bool = False
    _start_ns: int = 0
    _last_ns: int = 0
    _turn: _Turn | None = None
    _requests: dict[tuple[int, int], tuple[ToolRequested, int]] = field(default_factory=dict)
    _environment_ns: int = 0
    _asked: str = ""
    _events: list[SpanEvent] = field(default_factory=list)

    def take(self, body: SessionEvent, now_ns: int) -> list[ReadableSpan]:
        """Fold one event that was logged at this time (nanoseconds since 1970); events come in log order."""
        now_ns = max(now_ns, self._last_ns)
        if not self._start_ns:
            self._start_ns = now_ns
        spans = self._take(body, now_ns)
        self._last_ns = now_ns
        return spans

    def _take(self, body: SessionEvent, now_ns: int) -> list[ReadableSpan]:
        match body:
            case SessionOpened():
                self.opened = self.opened or body
            case SessionResumed():
                self._events.append(SpanEvent("session.resumed", {semconv.RESUMED: body.reason[:200]}, now_ns))
            case MessageReceived():
                self._asked = self._asked or body.text
            case TurnSampled():
                return [*self._close_turn(), self._sampled(body, now_ns)]
            case ToolRequested():
                self._requests[body.turn, body.index] = (body, now_ns)
                if self._turn is not None:
                    self._turn.calls += 1
            case EnvironmentOpened():
                return [self._environment(body, now_ns)]
            case ToolCompleted():
                return [self._call(body, now_ns)]
            case SessionCompleted() | SessionFailed():
                self.ended = True
                return [*self._close_turn(), self._root(body, now_ns)]
            case _:
                pass
        return []

    def _context(self, step: str) -> SpanContext:
        return identity.context(self.session_id, step)

    @property
    def _root_context(self) -> SpanContext:
        return self._context(identity.ROOT)

    def _common(self) -> dict[str, Any]:
        policy = self.opened.policy if self.opened is not None else None
        return {semconv.CONVERSATION_ID: self.session_id, semconv.REQUEST_MODEL: policy}

    @property
    def _shows_content(self) -> bool:
        return self.opened is not None and bool(self.opened.group_id)

    # -- turns -------------------------------------------------------------------------------------------------

    def _sampled(self, body: TurnSampled, now_ns: int) -> ReadableSpan:
        took = int((body.queue_ms + body.prefill_ms + body.decode_ms) * NS_PER_MS)
        start = max(now_ns - took, self._last_ns, self._start_ns)
        self._turn = _Turn(body, start, now_ns, now_ns)
        opened = self.opened
        versions = sorted({span.version for span in body.spans})
        model = opened.policy if opened is not None else ""
        attributes = {
            semconv.OPERATION_NAME: semconv.CHAT,
            semconv.PROVIDER_NAME: semconv.PROVIDER,
            **self._common(),
            semconv.RESPONSE_MODEL: f"{model}@{','.join(map(str, versions))}",
            semconv.REQUEST_TEMPERATURE: opened.sampling.temperature if opened is not None else None,
            semconv.REQUEST_SEED: opened.sampling.seed if opened is not None else None,
            semconv.REQUEST_MAX_TOKENS: opened.budget.max_turn_tokens if opened is not None else None,
            semconv.RESPONSE_FINISH_REASONS: [body.finish_reason],
            semconv.USAGE_INPUT_TOKENS: body.position + len(body.prompt) // INT32_BYTES,
            semconv.USAGE_OUTPUT_TOKENS: len(body.completion) // INT32_BYTES,
            semconv.USAGE_CACHE_READ_INPUT_TOKENS: body.cached_tokens,
            semconv.VERSIONS: versions,
            semconv.NUMERICS_ID: body.numerics_id,
            semconv.QUEUE_MS: body.queue_ms,
            semconv.PREFILL_MS: body.prefill_ms,
            semconv.DECODE_MS: body.decode_ms,
        }
        return self.maker.make(
            f"{semconv.CHAT} {model}".strip(),
            self._context(f"chat.{body.turn}"),
            self._context(f"turn.{body.turn}"),
            start,
            now_ns,
            attributes,
            kind=SpanKind.CLIENT,
        )

    def _close_turn(self) -> list[ReadableSpan]:
        turn, self._turn = self._turn, None
        if turn is None:
            return []
        attributes = {
            **self._common(),
            semconv.TURN: turn.body.turn,
            semconv.SEGMENT: turn.body.segment,
            semconv.CALLS: turn.calls,
            semconv.VERSIONS: sorted({span.version for span in turn.body.spans}),
        }
        context = self._context(f"turn.{turn.body.turn}")
        name = f"turn {turn.body.turn}"
        return [self.maker.make(name, context, self._root_context, turn.start_ns, turn.end_ns, attributes)]

    # -- calls -------------------------------------------------------------------------------------------------

    def _environment(self, body: EnvironmentOpened, now_ns: int) -> ReadableSpan:
        waiting = [at for _, at in self._requests.values()]
        turn = self._turn
        parent = self._context(f"turn.{turn.body.turn}") if turn is not None else self._root_context
        self._environment_ns = now_ns
        if turn is not None:
            turn.end_ns = now_ns
        attributes = {
            semconv.CONVERSATION_ID: self.session_id,
            semconv.SANDBOX_ID: body.sandbox_id,
            semconv.DRIVER: body.driver,
            semconv.REBUILT: body.rebuilt,
        }
        context = self._context(f"environment.{body.sandbox_id}")
        return self.maker.make("environment.open", context, parent, min(waiting, default=now_ns), now_ns, attributes)

    def _call(self, body: ToolCompleted, now_ns: int) -> ReadableSpan:
        request, asked_ns = self._requests.pop((body.turn, body.index), (None, now_ns))
        start = max(asked_ns, self._environment_ns)
        end = min(now_ns, start + int(body.duration_ms * NS_PER_MS))
        turn = self._turn
        if turn is not None and turn.body.turn == body.turn:
            turn.end_ns = now_ns
        name = request.name if request is not None else ""
        shown = self._shows_content
        attributes = {
            semconv.OPERATION_NAME: semconv.EXECUTE_TOOL,
            semconv.CONVERSATION_ID: self.session_id,
            semconv.TOOL_NAME: name,
            semconv.TOOL_TYPE: "function",
            semconv.TOOL_CALL_ID: body.call_id,
            semconv.TURN: body.turn,
            semconv.EFFECT: request.effect if request is not None else None,
            semconv.CHANGED_FILES: len(body.delta.changes) if body.delta is not None else None,
            semconv.TOOL_CALL_ARGUMENTS: dict(request.arguments) if shown and request is not None else None,
            semconv.TOOL_CALL_RESULT: body.text if shown else None,
        }
        return self.maker.make(
            f"{semconv.EXECUTE_TOOL} {name}".strip(),
            self._context(f"call.{body.turn}.{body.index}"),
            self._context(f"turn.{body.turn}"),
            start,
            end,
            attributes,
            error="tool_error" if body.is_error else None,
        )

    # -- the end -----------------------------------------------------------------------------------------------

    def _root(self, body: SessionCompleted | SessionFailed, now_ns: int) -> ReadableSpan:
        opened = self.opened
        attributes: dict[str, Any] = {
            semconv.OPERATION_NAME: semconv.INVOKE_AGENT,
            semconv.PROVIDER_NAME: semconv.PROVIDER,
            semconv.AGENT_NAME: semconv.PROVIDER,
            **self._common(),
            semconv.GROUP_ID: (opened.group_id or None) if opened is not None else None,
            semconv.LANE: (opened.lane or None) if opened is not None else None,
            semconv.ATTEMPT: opened.attempt if opened is not None else None,
            semconv.TASK: str(opened.task) if opened is not None and opened.task is not None else None,
            semconv.INPUT_MESSAGES: _messages(self._asked) if self._shows_content else None,
        }
        error = None
        if isinstance(body, SessionFailed):
            attributes[semconv.END_REASON], error = "failed", "infrastructure"
        else:
            attributes[semconv.END_REASON] = body.reason
            attributes[semconv.SAMPLED_TOKENS] = body.usage.sampled_tokens
        return self.maker.make(
            "session", self._root_context, None, self._start_ns, now_ns, attributes, error=error, events=self._events
        )


def _messages(text: str) -> list[dict[str, Any]]:
    """A user's message in the form of the conventions."""
    return [{"role": "user", "parts": [{"type": "text", "content": text}]}]
