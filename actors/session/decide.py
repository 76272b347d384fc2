"""What a session does next: a pure function of its folded state and the template.

Same state, same action: that is why a resumed session goes on exactly where the log ends. The only input from a
clock is the caller's `out_of_time`, and the decision it leads to is logged as the session's end reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session.condense import condensed, due, summary_prompt
from odradek.actors.session.state import CallState, SessionState
from odradek.streams.events.sessions import ContextSummarized, Effect, EndReason, TurnPurpose

MIN_COMPLETION_TOKENS = 4
"""Tokens. A turn needs room for at least a call's opening and the stop token; below this the context counts as full.
Too low samples turns that can't say anything; too high ends sessions that could have finished."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Ask the model for a turn. `context` + `prompt` is all it sees."""

    turn: int
    position: int
    prompt: list[int]
    context: list[int]
    max_new_tokens: int
    messages: list[str]
    purpose: TurnPurpose = "act"


@dataclass(frozen=True, slots=True)
class RunCalls:
    """Run these calls together: adjacent pure calls, or a single call with an effect."""

    calls: list[CallState]


@dataclass(frozen=True, slots=True)
class Condense:
    """Begin a new segment with this prompt."""

    event: ContextSummarized


@dataclass(frozen=True, slots=True)
class Complete:
    """The session is over."""

    reason: EndReason


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do until an input arrives."""


Action = Sample | RunCalls | Condense | Complete | Wait


def next_action(
    state: SessionState, template: ChatTemplate, effects: Mapping[str, Effect], *, out_of_time: bool = False
) -> Action:
    """The one next step of an opened, unfinished session.

    `effects` maps a tool's name to its declared effect; an unknown tool is pure (its result is an error text).
    """
    assert state.opened is not None and state.end is None
    if state.cancel is not None:
        return Complete("cancelled")
    if out_of_time:
        return Complete("wall_clock")
    if not state.turns:
        return _sample(state, template) if state.waiting_messages else Wait()
    if state.turns[-1].event.purpose == "summary" and len(state.turns) > state.segment_turns:
        return _condense(state, template)
    last = state.acts[-1]
    if last.event.finish_reason == "length":
        return Complete("turn_length")
    if state.open_calls:
        return RunCalls(barrier_group(state.open_calls, effects))
    if not state.waiting_messages:
        if last.done:
            return Complete("done")
        if not last.calls:
            return Complete("no_call")
    if len(state.acts) >= state.opened.budget.max_turns:
        return Complete("turns")
    return _sample(state, template)


def barrier_group(calls: list[CallState], effects: Mapping[str, Effect]) -> list[CallState]:
    """The leading calls that may run together. A call with an effect is a barrier and runs alone.

    >>> # pure, pure, effect, pure -> [pure, pure], then [effect], then [pure]
    """

    def pure(call: CallState) -> bool:
        return call.parse_error is not None or effects.get(call.name, "pure") == "pure"

    if not pure(calls[0]):
        return calls[:1]
    group: list[CallState] = []
    for call in calls:
        if not pure(call):
            break
        group.append(call)
    return group


def _sample(state: SessionState, template: ChatTemplate) -> Action:
    assert state.opened is not None
    prompt = next_prompt(state, template)
    budget = state.opened.budget
    room = budget.max_context_tokens - len(state.context) - len(prompt)
    if due(state, len(prompt), full=room < MIN_COMPLETION_TOKENS):
        return _summarise(state, template) or _condense(state, template)
    if room < MIN_COMPLETION_TOKENS:
        return Complete("context")
    return Sample(
        turn=len(state.turns),
        position=len(state.context),
        prompt=prompt,
        context=state.context,
        max_new_tokens=min(budget.max_turn_tokens, room),
        messages=[m.message_id for m in state.waiting_messages],
    )


def _summarise(state: SessionState, template: ChatTemplate) -> Sample | None:
    """A turn in which the model writes its summary; None where the harness has to."""
    found = summary_prompt(state, template)
    if found is None:
        return None
    prompt, room = found
    return Sample(len(state.turns), len(state.context), prompt, state.context, room, messages=[], purpose="summary")


def _condense(state: SessionState, template: ChatTemplate) -> Condense | Complete:
    assert state.opened is not None
    waiting = sum(len(template.user(message.text)) for message in state.waiting_messages)
    event = condensed(state, template, state.opened.budget.max_context_tokens - waiting - MIN_COMPLETION_TOKENS)
    return Condense(event) if event is not None else Complete("context")


def next_prompt(state: SessionState, template: ChatTemplate) -> list[int]:
    """Token ids that are new since the last turn: results in call order, then messages in the order they came."""
    tokens: list[int] = []
    messages = list(state.waiting_messages)
    if not state.turns:
        tokens += template.open(messages.pop(0).text)
    elif state.unshown:
        tokens += template.results(state.unshown)
    for message in messages:
        tokens += template.user(message.text)
    return tokens
