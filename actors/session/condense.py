"""When and how a session condenses its own context. Pure: the same state gives the same new context.

Guarantees (each has a test of its name):
- no orphan: a condensed context holds every call with its result or neither. Nothing is condensed while a call of the
  newest turn has no logged result, and a turn is kept together with its results or left to the summary with them;
- what was asked is never summed up: the first prompt stays as it was sampled from, later requests stay in full;
- token in, token out: the first prompt, the model's summary and the kept turns go over as the ids they were;
- it ends: between two condensations at least one turn acts, and what does not fit even then ends the session.

The model is asked for its summary in a turn of its own, at the end of the old context (its keys and values are all in
the cache, and its tokens are trained like any). Where it gives none that can be used, or there is no room to ask, the
harness makes a digest: one line a call, newest kept first, and the event says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session.state import CallState, SessionState, Turn
from odradek.streams.codec import i32, read_i32
from odradek.streams.events.sessions import ContextSummarized, SummarySource

ASK = "Context is nearly full. Call no tool. Sum up what you found, what you changed and what is left to do."
"""What the model is told when it has to condense."""
SUMMARY_TITLE = "Your summary of the work so far:"
DIGEST_TITLE = "Digest of earlier calls (made by the harness, not by you):"

NOTE_SHARE = 0.2
"""Largest share of the context budget that a summary or digest may take. Too low forgets what was found; too high
leaves no room to go on, and the context is condensed again and again."""
KEEP_SHARE = 0.25
"""Largest share of the context budget for the newest turns, kept as they are. Too low makes the model read a file again
that it has just read; too high as above."""
MIN_SUMMARY_TOKENS = 16
"""Room below which the model is not asked: it could not say anything."""
VALUE_CHARACTERS = 40
"""Characters of an argument in a digest's line."""
RESULT_CHARACTERS = 80
"""Characters of a result's first line in a digest."""


def due(state: SessionState, prompt_tokens: int, *, full: bool) -> bool:
    """Whether the next prompt is too long to be sent and something of this segment can be condensed."""
    assert state.opened is not None
    settings = state.opened.condense
    if settings is None or len(state.turns) == state.segment_turns:
        return False
    limit = int(settings.at * state.opened.budget.max_context_tokens)
    return full or len(state.context) + prompt_tokens > limit


def summary_prompt(state: SessionState, template: ChatTemplate) -> tuple[list[int], int] | None:
    """What asks the model for its summary, after the newest results, and how many tokens it may take; None if the
    harness is to write it, or there is no room."""
    assert state.opened is not None and state.opened.condense is not None
    if state.opened.condense.source == "digest":
        return None
    prompt = (template.results(state.unshown) if state.unshown else []) + template.user(ASK)
    budget = state.opened.budget
    room = budget.max_context_tokens - len(state.context) - len(prompt)
    if room < MIN_SUMMARY_TOKENS:
        return None
    return prompt, min(room, _note_limit(state), budget.max_turn_tokens)


def condensed(state: SessionState, template: ChatTemplate, limit: int) -> ContextSummarized | None:
    """The new segment's beginning, of at most `limit` tokens; None where even that is not possible."""
    acts = [turn for turn in state.turns[state.segment_turns :] if turn.event.purpose == "act"]
    used = len(state.context) - _segment_start(state)
    keep = min(int(KEEP_SHARE * _budget(state)), used // 2)
    first_kept = len(acts)
    tail: list[int] = []
    while first_kept > 0:
        longer = _as_they_stood(acts, first_kept - 1, template)
        if len(longer) > keep:
            break
        first_kept, tail = first_kept - 1, longer
    while True:
        event, length = _event(state, template, acts, first_kept, tail)
        if length <= limit:
            return event
        if first_kept == len(acts):
            return None
        first_kept += 1
        tail = _as_they_stood(acts, first_kept, template)


def digest(turns: Sequence[Turn], template: ChatTemplate, limit: int) -> list[int]:
    """Ids of at most `limit` tokens: one line a call in order, the oldest left out first and counted."""
    lines = [_line(call) for turn in turns for call in turn.calls]
    chosen: list[list[int]] = []
    left = limit - len(template.text(_left_out(len(lines))))
    for line in reversed(lines):
        ids = template.text(f"{line}\n")
        if len(ids) > left:
            break
        left -= len(ids)
        chosen.append(ids)
    missing = len(lines) - len(chosen)
    ids = template.text(_left_out(missing)) if missing else []
    return [*ids, *(token for line in reversed(chosen) for token in line)]


def _event(
    state: SessionState, template: ChatTemplate, acts: Sequence[Turn], first_kept: int, tail: list[int]
) -> tuple[ContextSummarized, int]:
    """The event if turns from `first_kept` on are kept, and its length in tokens."""
    cut = acts[first_kept - 1].event.turn if first_kept else acts[0].event.turn - 1
    gone = [turn for turn in state.acts if turn.event.turn <= cut]
    # What the first kept turn was asked stands before its completion, so the kept tokens do not have it.
    asked = [turn.event for turn in [*gone, *acts[first_kept:][:1]]]
    later = [message for event in asked if event.turn > 0 for message in event.messages]
    note, source, reason = _note(state, template, gone)
    prompt = read_i32(state.turns[0].event.prompt)
    for message in later:
        prompt += template.user(state.messages[message])
    prompt += note + tail
    event = ContextSummarized(
        segment=state.segment + 1, prompt=i32(prompt), cut_after_turn=cut, source=source, reason=reason
    )
    return event, len(prompt)


def _note(state: SessionState, template: ChatTemplate, gone: Sequence[Turn]) -> tuple[list[int], SummarySource, str]:
    """The model's summary if it can be used, else the harness's digest and why."""
    assert state.opened is not None and state.opened.condense is not None
    last = state.turns[-1].event
    if state.opened.condense.source == "digest":
        reason = "setting"
    elif last.purpose != "summary":
        reason = "no_room"
    elif last.finish_reason == "length":
        reason = "too_long"
    else:
        said = template.text_ids(read_i32(last.completion))
        if template.parse(said).text.strip():
            return template.note(SUMMARY_TITLE, said), "model", ""
        reason = "empty"
    return template.note(DIGEST_TITLE, digest(gone, template, _note_limit(state))), "digest", reason


def _as_they_stood(acts: Sequence[Turn], first: int, template: ChatTemplate) -> list[int]:
    """Turns from `first` on as the old context held them: each with what came after it, up to its last results."""
    ids: list[int] = []
    for at in range(first, len(acts)):
        if at > first:
            ids += read_i32(acts[at].event.prompt)
        ids += read_i32(acts[at].event.completion)
    results = [call.result.text for turn in acts[first:][-1:] for call in turn.calls if call.result is not None]
    return ids + (template.results(results) if results else [])


def _segment_start(state: SessionState) -> int:
    """Tokens of this segment that were there before its first turn's completion."""
    first = state.turns[state.segment_turns].event
    return first.position + len(read_i32(first.prompt))


def _budget(state: SessionState) -> int:
    assert state.opened is not None
    return state.opened.budget.max_context_tokens


def _note_limit(state: SessionState) -> int:
    return max(MIN_SUMMARY_TOKENS, int(NOTE_SHARE * _budget(state)))


def _line(call: CallState) -> str:
    arguments = " ".join(f"{key}={_short(value, VALUE_CHARACTERS)}" for key, value in call.arguments.items())
    text = call.result.text if call.result is not None else ""
    more = max(0, len(text.splitlines()) - 1)
    tail = f" (+{more} lines)" if more else ""
    return f"{call.name} {arguments}: {_short(text, RESULT_CHARACTERS)}{tail}"


def _short(text: str, limit: int) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _left_out(number: int) -> str:
    return f"({number} earlier calls are not listed)\n"
