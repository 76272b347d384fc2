"""A session's state as a fold of its records.

Which records count is `streams.ownership`'s rule of one owner; this fold says what they mean.

Pure: no clock, no client. `apply` is the only way in; `SessionState` holds nothing that the log does not.

Guarantee 2 (tests/GUARANTEES.md): test_session_runner.py, test_sandbox_delta.py, test_projections.py,
test_assembler_loop.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from odradek.actors.policy.template import ChatTemplate, ParsedCall
from odradek.streams.codec import read_f32, read_i32
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    CancelRequested,
    ContextSummarized,
    EnvironmentClosed,
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
    Usage,
    WorkspaceDelta,
)
from odradek.streams.ownership import OwnerRule

OwnerEvent = (
    EnvironmentOpened
    | EnvironmentClosed
    | TurnSampled
    | ToolRequested
    | ToolCompleted
    | ContextSummarized
    | SessionCompleted
    | SessionFailed
)
Input = MessageReceived | CancelRequested


@dataclass(slots=True)
class CallState:
    """One call of one turn: parsed from the completion, then requested, then completed."""

    call_id: str
    turn: int
    index: int
    name: str
    arguments: Mapping[str, str]
    parse_error: str | None
    requested: bool = False
    """An owner has said that it will run it: it may have."""
    external: bool = False
    """As that owner said: its effect is not undone by rebuilding the workspace."""
    result: ToolCompleted | None = None


@dataclass(slots=True)
class Turn:
    """A sampled turn with its calls, in written order."""

    event: TurnSampled
    calls: list[CallState]
    done: bool


@dataclass(slots=True)
class SessionState:
    """What one session is after some prefix of its records. Token lists cover the current segment."""

    session_id: str
    opened: SessionOpened | None = None
    meta: Meta = field(default_factory=Meta)
    first_offset: int = -1
    last_offset: int = -1
    rule: OwnerRule = field(default_factory=OwnerRule)
    context: list[int] = field(default_factory=list)
    segment: int = 0
    position_base: int = 0
    """Tokens of the segments before this one: no random number of the session is drawn twice."""
    segment_turns: int = 0
    """Turns sampled before this segment; their calls and results are in its first prompt, or summed up there."""
    messages: dict[str, str] = field(default_factory=dict)
    """Text of every message received, by id."""
    waiting_messages: list[MessageReceived] = field(default_factory=list)
    """Received and not yet part of a turn's prompt."""
    turns: list[Turn] = field(default_factory=list)
    deltas: list[WorkspaceDelta] = field(default_factory=list)
    environment: EnvironmentOpened | None = None
    environments: int = 0
    """Sandboxes the session has had; any after the first was rebuilt from the log."""
    cancel: CancelRequested | None = None
    end: SessionCompleted | SessionFailed | None = None
    withheld: bool = False
    """Some of it could not be read: its subject was erased, or the key is not at hand. Counts are true, texts are not,
    and the session cannot go on."""
    sampled_tokens: int = 0

    @property
    def epoch(self) -> int:
        """The current owner's epoch."""
        return self.rule.epoch

    @property
    def acts(self) -> list[Turn]:
        """The turns that act; the others wrote summaries."""
        return [turn for turn in self.turns if turn.event.purpose == "act"]

    @property
    def own_turns(self) -> int:
        """Turns sampled here, and not in the session that this one branched off from."""
        return sum(turn.event.copied_from is None for turn in self.turns)

    @property
    def unshown(self) -> list[str]:
        """Results of the newest turn's calls, in call order, that no prompt holds yet."""
        if len(self.turns) == self.segment_turns:
            return []
        return [call.result.text for call in self.turns[-1].calls if call.result is not None]

    @property
    def open_calls(self) -> list[CallState]:
        """Calls of the newest turn that have no logged result yet, in written order."""
        return [call for call in self.turns[-1].calls if call.result is None] if self.turns else []

    def usage(self) -> Usage:
        """What the session has used so far; folded, so that a resumed session counts the same."""
        calls = [call for turn in self.turns for call in turn.calls]
        return Usage(
            turns=len(self.acts),
            calls=len(calls),
            failed_calls=sum(1 for call in calls if call.result is not None and call.result.is_error),
            parallel_turns=sum(1 for turn in self.turns if len(turn.calls) > 1),
            sampled_tokens=self.sampled_tokens,
            context_tokens=len(self.context),
            segments=self.segment + 1,
        )


def call_id(turn: int, index: int) -> str:
    """Deterministic within a session, so that a resumed owner names a call as its predecessor did."""
    return f"{turn}.{index}"


class SessionFold:
    """Applies records to a `SessionState`. The template turns completion ids into calls."""

    def __init__(self, session_id: str, template: ChatTemplate) -> None:
        self.state = SessionState(session_id)
        self._template = template

    def apply_all(self, records: Iterable[tuple[int, str, Meta, SessionEvent]]) -> SessionState:
        """Fold (offset, event id, meta, body) in log order."""
        for offset, event_id, meta, body in records:
            self.apply(offset, event_id, meta, body)
        return self.state

    def apply(self, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> bool:
        """Fold one record; False when the rule of one owner (or of the first id) set it aside."""
        state = self.state
        state.last_offset = max(state.last_offset, offset)
        if not state.rule.accepts(offset, event_id, meta, body):
            return False
        state.withheld = state.withheld or meta.cipher is not None
        match body:
            case SessionOpened() if state.opened is None:
                state.opened, state.meta, state.first_offset = body, meta, offset
            case SessionOpened() | SessionResumed():
                pass
            case MessageReceived() | CancelRequested():
                self._input(body)
            case _:
                self._owner(body)
        return True

    def _input(self, body: Input) -> None:
        if isinstance(body, MessageReceived):
            self.state.messages[body.message_id] = body.text
            self.state.waiting_messages.append(body)
        elif self.state.cancel is None:
            self.state.cancel = body

    def _owner(self, body: OwnerEvent) -> None:
        state = self.state
        match body:
            case EnvironmentOpened():
                state.environment = body
                state.environments += 1
            case EnvironmentClosed():
                state.environment = None
            case TurnSampled():
                self._turn(body)
            case ToolRequested():
                call = self._call(body.turn, body.index)
                call.requested, call.external = True, body.effect == "external"
            case ToolCompleted():
                self._call(body.turn, body.index).result = body
                if body.delta is not None and body.delta.changes:
                    state.deltas.append(body.delta)
            case ContextSummarized():
                state.position_base += len(state.context)
                state.segment, state.segment_turns = body.segment, len(state.turns)
                state.context = read_i32(body.prompt)
            case SessionCompleted() | SessionFailed():
                state.end = body

    def _turn(self, body: TurnSampled) -> None:
        state = self.state
        completion = read_i32(body.completion)
        state.context.extend(read_i32(body.prompt))
        state.context.extend(completion)
        state.sampled_tokens += len(completion) if body.copied_from is None else 0
        state.waiting_messages = [m for m in state.waiting_messages if m.message_id not in body.messages]
        parsed = self._template.parse(completion if not state.withheld else [])
        calls = [self._parsed(body.turn, index, call) for index, call in enumerate(parsed.calls)]
        acts = body.purpose == "act"
        state.turns.append(Turn(body, calls if acts else [], parsed.done and acts))

    @staticmethod
    def _parsed(turn: int, index: int, call: ParsedCall) -> CallState:
        return CallState(call_id(turn, index), turn, index, call.name, call.arguments, call.error)

    def _call(self, turn: int, index: int) -> CallState:
        calls = self.state.turns[turn].calls
        while self.state.withheld and len(calls) <= index:  # the turn that asked for them cannot be read
            calls.append(CallState(call_id(turn, len(calls)), turn, len(calls), "", {}, None))
        return calls[index]


def logprobs(event: TurnSampled) -> list[float]:
    """The sampler's log-probabilities of a turn's completion tokens."""
    return read_f32(event.logprobs)
