"""Condensing a context, over random sessions: sizes, parallel calls, summaries of any ids, any budget."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.condense_world import Condenser, condensing, no_orphan
from support.session_world import FolderEnvironment, MemoryJournal, runner, template, turn

from odradek.actors.session.decide import MIN_COMPLETION_TOKENS
from odradek.actors.session.runner import SessionRunner
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.codec import read_i32
from odradek.streams.events.sessions import ContextSummarized, MessageReceived, SessionCompleted, TurnSampled

T = template()
SIZES = st.integers(0, 60)
TURNS = st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=8)


def asked(number: int, size: int) -> str:
    return f"request {number}: " + "look " * size


def count(tokens: list[int], part: list[int]) -> int:
    return sum(tokens[at : at + len(part)] == part for at in range(len(tokens)))


async def run(session: SessionRunner, environment: FolderEnvironment, messages: dict[int, int]) -> None:
    """To its end; each message comes once so many calls have run."""
    waiting = dict(messages)
    run_calls = environment.run_calls

    async def and_ask(*arguments: Any, **more: Any) -> Any:
        outcomes = await run_calls(*arguments, **more)
        for number in [n for n in waiting if n <= len(environment.runs)]:
            text = asked(number, waiting.pop(number))
            await session.post(MessageReceived(message_id=f"m{number}", text=text))
        return outcomes

    environment.run_calls = and_ask  # type: ignore[method-assign]
    await session.run()


@given(
    turns=TURNS,
    source=st.sampled_from(["model", "digest"]),
    at=st.floats(0.1, 1.0),
    context=st.integers(60, 500),
    summary=st.lists(st.integers(0, T.tokenizer.vocab_size - 1), max_size=60),
    messages=st.dictionaries(st.integers(0, 12), st.integers(1, 12), max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_whatever_is_condensed_no_call_is_orphaned_every_token_is_trained_once_and_it_ends(
    turns: list[list[int]], source: str, at: float, context: int, summary: list[int], messages: dict[int, int]
) -> None:
    """`messages`: by number of calls that have run when it comes, its length."""
    files = {f"f{size}": "1 + " * size for sizes in turns for size in sizes}
    script = [turn(T, *(("read_file", {"path": f"f{size}"}) for size in sizes)) for sizes in turns]
    stop = next(iter(T.stop_ids))
    model = Condenser([*script, turn(T, done=True)], summary=[t for t in summary if t != stop] + [stop])
    journal = MemoryJournal()
    one = condensing(files, source, at=at, max_context_tokens=context, max_turns=12)  # type: ignore[arg-type]
    asyncio.run(run(runner(journal, model, environment := FolderEnvironment(), one), environment, messages))
    bodies = journal.bodies()
    assert sum(isinstance(body, SessionCompleted) for body in bodies) == 1
    texts = {f"m{n}": T.user(asked(n, size)) for n, size in messages.items()} | {"0": T.open(one.message)}
    shown: set[str] = set()
    events = [body for body in bodies if isinstance(body, TurnSampled)]
    for event, (_, tokens) in zip(events, model.asked, strict=True):
        assert no_orphan(tokens) and len(tokens) <= context - MIN_COMPLETION_TOKENS
        shown.update(event.messages)
        assert {name for name, ids in texts.items() if count(tokens, ids) == 1} == shown, "asked, in full, once"
    acted = True
    for body, after in pairwise(bodies):
        if isinstance(body, ContextSummarized):
            assert acted, "condensed twice without a turn between"
            assert no_orphan(read_i32(body.prompt)) and body.source in (source, "digest")
            acted = False
            assert not (isinstance(after, SessionCompleted) and after.reason == "context"), "condensed in vain"
        acted = acted or (isinstance(body, TurnSampled) and body.purpose == "act")
    made = sequence_of("s", journal.history("s"))
    trained = [t for s in made.segments for t, m in zip(s.tokens, s.mask, strict=True) if m]
    assert trained == [t for b in bodies if isinstance(b, TurnSampled) for t in read_i32(b.completion)]
