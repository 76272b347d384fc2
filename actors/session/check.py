"""Whether a session's records are what the state machine produces: the fold, each step compared before it is taken.

Guarantees (test_session_check.py):
- a log as its owners wrote it passes: takeovers, zombies, records that were appended again, inputs at any moment;
- the first record that `decide` would not have led to stops the check there, with a `ReplayDivergence`: one that is
  missing, swapped, doubled under another id or changed. No model and no tool is asked.

What no log can show: a record missing at its very end, and what a model or a tool answered. Which inputs a decision
had seen is the log's word: they may come between a decision and its record. Content of an erased subject is not
compared, its order is. What a fork took over is compared in its parent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session.decide import Action, Complete, Condense, RunCalls, Sample, next_action
from odradek.actors.session.errors import ReplayDivergence
from odradek.actors.session.state import SessionFold, SessionState
from odradek.streams.codec import read_i32
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    CancelRequested,
    ContextSummarized,
    Effect,
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
)
from odradek.streams.ownership import SessionRecord


def check(
    session_id: str, records: Iterable[SessionRecord], template: ChatTemplate, *, topic: str, partition: int
) -> SessionState:
    """The folded state of one session's records; raises ReplayDivergence at the first that does not follow."""
    checker = _Checker(session_id, template, topic, partition)
    for record in records:
        checker.take(*record)
    checker.settle()
    return checker.fold.state


class _Checker:
    def __init__(self, session_id: str, template: ChatTemplate, topic: str, partition: int) -> None:
        self.fold = SessionFold(session_id, template)
        self._template = template
        self._place = (topic, partition)
        self._effects: dict[str, Effect] = {}
        """As the log says: a tool's effect may be another today."""
        self._gap: tuple[str, ReplayDivergence] | None = None
        """A record that came before its turn, by its id: no fault if its owner appended it again in order."""
        self._undecided = 0
        """Messages since the last decision that shows which of them it had seen."""
        self._cancelled_since = False

    def take(self, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> None:
        state = self.fold.state
        if state.opened is None and not isinstance(body, SessionOpened):
            raise self._divergence(offset, "session.opened", body)
        begins, inputs = isinstance(body, SessionOpened | SessionResumed), isinstance(body, _INPUTS)
        seen = state.rule.has_seen(event_id)
        if begins and not seen:
            self.settle()
        if not (begins or inputs or seen) and not self._in_order(offset, event_id, meta, body):
            self.fold.apply(offset, event_id, meta, body)
            return
        if not (begins or inputs or seen) and meta.cipher is None and not state.withheld:
            self._follows(offset, body)
        if self.fold.apply(offset, event_id, meta, body):
            self._note(event_id, body)

    def settle(self) -> None:
        """At an owner's end: what came before its turn and was not appended again shows that a record is missing."""
        if self._gap is not None:
            raise self._gap[1]

    def _note(self, event_id: str, body: SessionEvent) -> None:
        if self._gap is not None and self._gap[0] == event_id:
            self._gap = None
        match body:
            case MessageReceived():
                self._undecided += 1
            case CancelRequested():
                self._cancelled_since = True
            case SessionOpened() | SessionResumed() | TurnSampled() | ContextSummarized():
                self._undecided, self._cancelled_since = 0, False
            case _:
                pass

    def _in_order(self, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> bool:
        """Whether an owner event is the current owner's next; False if an older owner's, which does not count."""
        rule = self.fold.state.rule
        if meta.epoch > rule.epoch and not rule.holds(meta.epoch):
            raise self._divergence(offset, f"the takeover at offset {meta.epoch} before what its owner wrote", body)
        if not rule.holds(meta.epoch):
            return False
        if meta.seq > rule.next_seq:
            expected = f"number {rule.next_seq} of epoch {meta.epoch}"
            found = f"number {meta.seq}, {_named(body)}"
            self._gap = self._gap or (event_id, self._divergence(offset, expected, found))
            return False
        if meta.seq < rule.next_seq:
            expected, found = (
                f"number {rule.next_seq} of epoch {meta.epoch}",
                f"number {meta.seq} again, {_named(body)}",
            )
            raise self._divergence(offset, expected, found)
        if rule.ended and not isinstance(body, EnvironmentClosed):
            raise self._divergence(offset, "nothing after the session's end", body)
        return True

    def _follows(self, offset: int, body: SessionEvent) -> None:
        state = self.fold.state
        if state.opened is not None and state.opened.forked_from is not None and not state.own_turns:
            if isinstance(body, ToolRequested | ToolCompleted | ContextSummarized):
                return
            if isinstance(body, TurnSampled) and body.copied_from is not None:
                return
        match body:
            case SessionFailed():
                return  # a fault of ours may end a session anywhere
            case EnvironmentOpened():
                fits, expected = any(call.requested for call in state.open_calls), "a call that needs a sandbox"
            case EnvironmentClosed():
                has = state.environment.sandbox_id if state.environment is not None else None
                fits, expected = body.sandbox_id == has, f"the end of sandbox {has}" if has else "no sandbox to close"
            case ToolCompleted():
                call = next(iter(state.open_calls), None)
                fits = call is not None and call.requested and (call.turn, call.index) == (body.turn, body.index)
                expected = f"the result of call {call.call_id}" if call and call.requested else self._expected()
            case _:
                fits, expected = any(self._leads_to(action, body) for action in self._actions(body)), self._expected()
        if not fits:
            raise self._divergence(offset, expected, body)

    def _actions(self, body: SessionEvent) -> Iterator[Action]:
        """What the owner may have decided to do, by which of the newest inputs it had seen."""
        state = self.fold.state
        if isinstance(body, ToolRequested):
            self._effects[body.name] = body.effect
        waiting = state.waiting_messages
        for cancel in {
            id(one): one for one in (state.cancel, None if self._cancelled_since else state.cancel)
        }.values():
            for unseen in range(min(self._undecided, len(waiting)) + 1):
                had = waiting[: len(waiting) - unseen]
                yield next_action(
                    dataclasses.replace(state, cancel=cancel, waiting_messages=had), self._template, self._effects
                )

    def _leads_to(self, action: Action, body: SessionEvent) -> bool:
        match body, action:
            case SessionCompleted(), _ if body.reason == "wall_clock":
                return True
            case SessionCompleted(), Complete():
                return body.reason == action.reason and body.usage == self.fold.state.usage()
            case ContextSummarized(), Condense():
                return body == action.event
            case TurnSampled(), Sample():
                sampled = (body.turn, body.position, read_i32(body.prompt), body.messages, body.purpose)
                return sampled == (action.turn, action.position, action.prompt, action.messages, action.purpose)
            case ToolRequested(), RunCalls():
                call = next((one for one in action.calls if not one.requested), None)
                return call is not None and (body.turn, body.index, body.name, dict(body.arguments)) == (
                    call.turn,
                    call.index,
                    call.name,
                    dict(call.arguments),
                )
            case _:
                return False

    def _expected(self) -> str:
        if self.fold.state.end is not None:
            return "nothing after the session's end"
        match next_action(self.fold.state, self._template, self._effects):
            case Sample() as sample:
                return (
                    f"turn {sample.turn} at position {sample.position} with a prompt of {len(sample.prompt)} tokens "
                    f"and messages {sample.messages}"
                )
            case RunCalls() as run:
                return "call " + ", ".join(f"{call.call_id} {call.name}" for call in run.calls)
            case Condense() as condense:
                return f"segment {condense.event.segment}"
            case Complete() as complete:
                return f"the end, {complete.reason}"
            case _:
                return "a message"

    def _divergence(self, offset: int, expected: str, found: SessionEvent | str) -> ReplayDivergence:
        said = found if isinstance(found, str) else _named(found)
        return ReplayDivergence(self.fold.state.session_id, *self._place, offset, expected, said)


_INPUTS = (MessageReceived, CancelRequested)


def _named(body: SessionEvent) -> str:
    """A record in a few words, without what it says: content may be a subject's."""
    kind = str(body.__struct_config__.tag)
    match body:
        case TurnSampled():
            return (
                f"{kind} {body.turn} at position {body.position} with a prompt of {len(read_i32(body.prompt))} tokens "
                f"and messages {body.messages}"
            )
        case ToolRequested() | ToolCompleted():
            return f"{kind} {body.turn}.{body.index}"
        case ContextSummarized():
            return f"{kind} of segment {body.segment}"
        case SessionCompleted():
            return f"{kind}, {body.reason}"
        case _:
            return kind
