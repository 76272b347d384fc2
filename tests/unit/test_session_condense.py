"""Condensing a context (actors/session/condense.py): its promises by name, the model alone scripted."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from support.condense_world import SUMMARY, Condenser, condensing, no_orphan
from support.session_world import (
    FolderEnvironment,
    Killed,
    MemoryJournal,
    ScriptedModel,
    runner,
    spec,
    template,
    turn,
)

from odradek.actors.session import condense
from odradek.actors.session.runner import SessionSpec
from odradek.actors.session.state import CallState, SessionFold, Turn
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.codec import read_i32
from odradek.streams.events.sessions import (
    ContextSummarized,
    MessageReceived,
    SessionCompleted,
    SummarySource,
    ToolCompleted,
    TurnSampled,
)

T = template()
FILES = {name: f"{name} = {' + '.join(str(i * 37 % 101) for i in range(18))}\n" for name in "abcdefgh"}
DONE = turn(T, done=True)


def read(*paths: str) -> list[int]:
    return turn(T, *(("read_file", {"path": path}) for path in paths))


def given(source: SummarySource = "model", floor: int | None = None, **more: float) -> SessionSpec:
    return condensing(FILES, source, floor=floor, **more)  # type: ignore[arg-type]


async def ran(
    turns: list[list[int]], source: SummarySource = "model", summary: list[int] = SUMMARY, **more: float
) -> tuple[MemoryJournal, Condenser]:
    journal, model = MemoryJournal(), Condenser(turns, summary=summary)
    await runner(journal, model, FolderEnvironment(), given(source, **more)).run()
    return journal, model


def condensations(journal: MemoryJournal) -> list[ContextSummarized]:
    return [body for body in journal.bodies() if isinstance(body, ContextSummarized)]


def end(journal: MemoryJournal) -> SessionCompleted:
    (found,) = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    return found


SCRIPT = [*(read(name) for name in "abcdefg"), DONE]


async def test_a_full_context_is_condensed_by_the_model_and_the_session_goes_on() -> None:
    journal, model = await ran(SCRIPT)
    assert end(journal).reason == "done" and end(journal).usage.turns == len(SCRIPT)
    first, *_ = condensations(journal)
    assert (first.source, first.reason, first.segment) == ("model", "", 1)
    assert end(journal).usage.segments == 1 + len(condensations(journal)) >= 2
    text = T.tokenizer.decode(read_i32(first.prompt), show_specials=True)
    assert text.startswith("<task>fix test_total<agent>") and condense.SUMMARY_TITLE in text
    after = next(tokens for _, tokens in model.asked if tokens[: len(read_i32(first.prompt))] == read_i32(first.prompt))
    assert len(after) < 0.6 * 400


async def test_without_the_setting_a_full_context_ends_the_session_as_before() -> None:
    journal = MemoryJournal()
    await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), spec(FILES, max_context_tokens=200)).run()
    assert end(journal).reason in ("context", "turn_length") and not condensations(journal)


async def test_the_summary_is_sampled_and_logged_like_every_turn_and_goes_over_as_the_ids_it_was() -> None:
    journal, _ = await ran(SCRIPT)
    turns = [body for body in journal.bodies() if isinstance(body, TurnSampled)]
    (said, *_) = [one for one in turns if one.purpose == "summary"]
    assert read_i32(said.completion) == SUMMARY and len(said.logprobs) == len(said.completion)
    note = T.note(condense.SUMMARY_TITLE, T.text_ids(SUMMARY))
    prompt = read_i32(condensations(journal)[0].prompt)
    assert any(prompt[at : at + len(note)] == note for at in range(len(prompt)))


async def test_each_sampled_token_is_trained_once_and_rows_are_built_from_sampled_ids() -> None:
    journal, _ = await ran(SCRIPT)
    made = sequence_of("s", journal.history("s"))
    assert len(made.segments) == end(journal).usage.segments
    trained = [t for s in made.segments for t, m in zip(s.tokens, s.mask, strict=True) if m]
    sampled = [t for b in journal.bodies() if isinstance(b, TurnSampled) for t in read_i32(b.completion)]
    assert trained == sampled
    assert list(made.segments[-1].tokens) == SessionFold("s", T).apply_all(journal.history("s")).context


async def test_no_random_number_of_a_session_is_drawn_twice() -> None:
    """The engine draws by position in the session: every sampled token has a position of its own."""
    journal, model = await ran(SCRIPT)
    assert condensations(journal)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(model.spans))


@pytest.mark.parametrize(
    ("source", "summary", "at", "reason"),
    [
        ("digest", SUMMARY, 0.6, "setting"),
        ("model", T.turn(), 0.6, "empty"),
        ("model", read("a"), 0.6, "empty"),
        ("model", T.turn(text="on and on " * 60), 0.6, "too_long"),
        ("model", SUMMARY, 0.97, "no_room"),
    ],
)
async def test_where_the_model_gives_no_summary_the_harness_makes_a_digest_and_says_why(
    source: SummarySource, summary: list[int], at: float, reason: str
) -> None:
    journal, _ = await ran(SCRIPT, source, summary, at=at)
    first = condensations(journal)[0]
    assert (first.source, first.reason) == ("digest", reason)
    assert end(journal).reason == "done"
    summaries = {b.turn for b in journal.bodies() if isinstance(b, TurnSampled) and b.purpose == "summary"}
    assert not summaries & {r.turn for r in journal.results()}, "a call in a summary is none"
    text = T.tokenizer.decode(read_i32(first.prompt))
    assert condense.DIGEST_TITLE in text and re.search(r"read_file path=(\w): \1 = 0 \+ 37", text)


def test_a_digest_keeps_the_newest_calls_within_its_limit_and_counts_the_others() -> None:
    fold = SessionFold("s", T)
    state = fold.state
    made = TurnSampled(
        turn=0, position=0, prompt=b"", completion=b"", logprobs=b"", spans=[], numerics_id="", finish_reason="stop"
    )
    done = ToolCompleted(call_id="", turn=0, index=0, text="\n  first line\nsecond\nthird")
    calls = [CallState(f"0.{i}", 0, i, "grep", {"pattern": f"p{i}"}, None, result=done) for i in range(30)]
    state.turns.append(Turn(made, calls, False))
    ids = condense.digest(state.turns, T, 200)
    text = T.tokenizer.decode(ids)
    lines = text.splitlines()
    assert len(ids) <= 200 and lines[-1] == "grep pattern=p29: first line (+3 lines)"
    assert lines[0] == f"({30 - (len(lines) - 1)} earlier calls are not listed)"
    assert condense.digest(state.turns, T, 100_000) == T.text(
        "".join(f"grep pattern=p{i}: first line (+3 lines)\n" for i in range(30))
    )


@pytest.mark.parametrize("source", ["model", "digest"])
async def test_case_kimi_code_1054_no_orphan_result_either_way(source: SummarySource) -> None:
    """MoonshotAI/kimi-code PR 1054: one of three parallel results has landed when the owner dies; the next owner, whose
    context has to be condensed, first has the other two, and no context ever holds a call without its result."""
    script = [read("a", "b"), read("c", "d", "e"), read("f"), DONE]
    landed = 0
    undisturbed, _ = await ran(script, source, max_context_tokens=440)
    for records in range(1, len(undisturbed.records)):
        journal, model = MemoryJournal(fail_after=records), Condenser(script)
        one = given(source, max_context_tokens=440)
        with pytest.raises(Killed):
            await runner(journal, model, FolderEnvironment(), one).run()
        of_three = [r for r in journal.results() if r.turn == 1]
        landed += len(of_three) == 1
        journal.fail_after = None
        again = given(source, floor=0, max_context_tokens=440)
        await runner(journal, model, FolderEnvironment(), again).run(journal.history("s"))
        assert condensations(journal) == condensations(undisturbed), "the same cut, whoever makes it"
        assert all(no_orphan(read_i32(one.prompt)) for one in condensations(journal))
        for _, tokens in model.asked:
            assert no_orphan(tokens)
        assert len({r.call_id for r in journal.results()}) == len(journal.results()) == 6
    assert landed == 1 and condensations(undisturbed)


async def test_a_kept_turn_stands_as_it_stood_and_the_cut_is_named() -> None:
    journal, _ = await ran(SCRIPT)
    first = condensations(journal)[0]
    turns = {b.turn: b for b in journal.bodies() if isinstance(b, TurnSampled) and b.purpose == "act"}
    kept = turns[first.cut_after_turn + 1]
    results = {r.turn: r.text for r in journal.results()}
    tail = read_i32(kept.completion) + T.results([results[kept.turn]])
    assert read_i32(first.prompt)[-len(tail) :] == tail


async def test_what_was_asked_is_never_summed_up() -> None:
    """A later request stays in full, wherever the cut falls, and exactly once."""
    journal = MemoryJournal()
    model = Condenser(SCRIPT)
    environment = FolderEnvironment()
    one = runner(journal, model, environment, given())
    asked: list[str] = []

    async def ask_more() -> None:
        if len(environment.runs) in (1, 4) and len(asked) < len(environment.runs):
            asked.append(f"and also look at number {len(environment.runs)}")
            await one.post(MessageReceived(message_id=f"m{len(environment.runs)}", text=asked[-1]))

    run_calls = environment.run_calls

    async def with_requests(*arguments, **more):  # type: ignore[no-untyped-def]
        outcomes = await run_calls(*arguments, **more)
        await ask_more()
        return outcomes

    environment.run_calls = with_requests  # type: ignore[method-assign]
    await one.run()
    assert len(condensations(journal)) >= 2
    final = T.tokenizer.decode(SessionFold("s", T).apply_all(journal.history("s")).context, show_specials=True)
    for text in ["fix test_total", *dict.fromkeys(asked)]:
        assert final.count(f"<task>{text}<agent>") == 1


async def test_what_does_not_fit_even_condensed_ends_the_session() -> None:
    """A result longer than the whole context is left to the digest; a task that leaves no room ends it."""
    huge = dict(FILES, a="1 + " * 400)
    journal, model = MemoryJournal(), Condenser([read("a"), DONE])
    one = replace(given(), start=replace(given().start, files={k: v.encode() for k, v in huge.items()}))
    await runner(journal, model, FolderEnvironment(), one).run()
    assert end(journal).reason == "done" and condensations(journal)[0].reason == "no_room"
    journal = MemoryJournal()
    crowded = replace(given(max_context_tokens=60), message="mend " * 20)
    await runner(journal, Condenser([read("a"), DONE]), FolderEnvironment(), crowded).run()
    assert end(journal).reason == "context" and not condensations(journal)


async def test_a_session_survives_the_death_of_its_actor_mid_summary() -> None:
    """Guarantee 3 with a condensation under way: before its turn, between the turn and the new segment, after it."""
    undisturbed, _ = await ran(SCRIPT)
    expected = SessionFold("s", T).apply_all(undisturbed.history("s"))
    last: set[str] = set()
    for records in range(1, len(undisturbed.records)):
        journal, model = MemoryJournal(fail_after=records), Condenser(SCRIPT)
        with pytest.raises(Killed):
            await runner(journal, model, FolderEnvironment(), given()).run()
        newest = journal.bodies()[-1]
        last.add(newest.purpose if isinstance(newest, TurnSampled) else type(newest).__name__)
        journal.fail_after = None
        await runner(journal, model, FolderEnvironment(), given(floor=0)).run(journal.history("s"))
        folded = SessionFold("s", T).apply_all(journal.history("s"))
        assert folded.context == expected.context and folded.position_base == expected.position_base
        assert condensations(journal) == condensations(undisturbed)
        assert [r.call_id for r in journal.results()] == [r.call_id for r in undisturbed.results()]
    assert last >= {"act", "summary", "ContextSummarized", "ToolRequested", "ToolCompleted"}, "it died at each of them"
