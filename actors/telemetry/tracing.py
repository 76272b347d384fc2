"""What an actor holds to be traced. Off unless an endpoint is configured, and then it costs nothing.

`Tracing.of("")` has `observe` and `traceparent` of None, imports no SDK and does nothing anywhere. Otherwise `observe`
is `SessionRunner`'s hook, `traceparent` is `KafkaJournal`'s, `restore` folds the history that a new owner starts from
(its spans were its predecessor's to send), and `grading` tells the reward actor's part. Nothing here ever raises into
an actor: a trace is worth less than the session it describes.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import SessionEvent, SessionOpened, SessionResumed
from odradek.streams.ownership import SessionRecord

if TYPE_CHECKING:
    from odradek.actors.telemetry.exporter import Sink
    from odradek.actors.telemetry.spans import SessionSpans, SpanMaker

log = logging.getLogger(__name__)

MAX_SESSIONS = 10_000
"""Sessions followed at once; the longest unheard-of is forgotten. Superseded owners' sessions never end here."""
NS_PER_MS = 1_000_000

Observe = Callable[[str, SessionEvent], None]


class Tracing:
    """See the module."""

    observe: Observe | None = None
    traceparent: Callable[[str], str | None] | None = None

    @classmethod
    def of(cls, endpoint: str, service: str, redact: Callable[[str], str] = str) -> Tracing:
        """For a deployment's `otlp_endpoint` and the actor's name."""
        if not endpoint:
            return cls()
        from odradek.actors.telemetry.exporter import Sink, otlp_processor
        from odradek.actors.telemetry.spans import SpanMaker

        return ActiveTracing(SpanMaker.of(service, redact), Sink(otlp_processor(endpoint)))

    def restore(self, session_id: str, history: Iterable[SessionRecord]) -> None:
        """Fold what earlier owners logged."""

    def grading(self, header: str | None, verdict: RewardAssigned | RewardUngraded, start_ns: int) -> None:
        """One verdict, from `start_ns` to now; `header` is the traceparent of the record that ended the session."""

    def close(self) -> None:
        """Send what waits."""


class ActiveTracing(Tracing):
    """With a collector to send to."""

    def __init__(self, maker: SpanMaker, sink: Sink, clock: Callable[[], int] = time.time_ns) -> None:
        self.observe = self._observe
        self.traceparent = self._traceparent
        self._maker = maker
        self._sink = sink
        self._clock = clock
        self._sessions: OrderedDict[str, SessionSpans] = OrderedDict()

    def restore(self, session_id: str, history: Iterable[SessionRecord]) -> None:
        for _, _, meta, body in history:
            self._guarded(self._take, session_id, body, meta.time_ms * NS_PER_MS, False)

    def grading(self, header: str | None, verdict: RewardAssigned | RewardUngraded, start_ns: int) -> None:
        self._guarded(self._grading, header, verdict, start_ns)

    def close(self) -> None:
        self._guarded(self._sink.close)

    def _observe(self, session_id: str, body: SessionEvent) -> None:
        self._guarded(self._take, session_id, body, self._clock(), True)

    def _traceparent(self, session_id: str) -> str | None:
        from odradek.actors.telemetry.identity import traceparent

        return traceparent(session_id)

    def _take(self, session_id: str, body: SessionEvent, now_ns: int, send: bool) -> None:
        from odradek.actors.telemetry.spans import SessionSpans

        spans = self._sessions.get(session_id)
        if spans is None:
            if not isinstance(body, SessionOpened | SessionResumed):
                return  # the sandbox of a session that has ended
            spans = self._sessions[session_id] = SessionSpans(session_id, self._maker)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._sessions.move_to_end(session_id)
        for span in spans.take(body, now_ns):
            if send:
                self._sink(span)
        if spans.ended:
            del self._sessions[session_id]

    def _grading(self, header: str | None, verdict: RewardAssigned | RewardUngraded, start_ns: int) -> None:
        from odradek.actors.telemetry.identity import parsed
        from odradek.actors.telemetry.loop import grading_span

        self._sink(grading_span(self._maker, verdict, parsed(header), start_ns, self._clock()))

    def _guarded(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        except Exception:
            log.exception("a span was lost")
