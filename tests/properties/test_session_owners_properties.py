"""Owners of one session in any order: zombies, two successors at once, deaths anywhere, inputs in between.

Whatever happened, the log alone tells one history, and one undisturbed owner takes it to its end.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.owners_world import DEPLOY, Owners, Shared
from support.session_world import FolderEnvironment, spec, template, turn

from odradek.actors.session.state import SessionFold, SessionState
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.events.sessions import (
    MessageReceived,
    SessionCompleted,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.ownership import accepted

T = template()
READ = ("read_file", {"path": "a.py"})
FIRST = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})
DOUBLE = ("edit_file", {"path": "a.py", "old": "2", "new": "22"})
OUT = (DEPLOY, {"command": "deploy"})
SCRIPT = [
    turn(T, READ, READ, READ),
    turn(T, FIRST, OUT),
    turn(T, READ, DOUBLE, OUT, READ),
    turn(T, done=True),
]
START, POST = "start", "post"
WHOLE = 75
"""About as many steps as an undisturbed owner takes."""
STEPS = st.tuples(
    st.integers(0, WHOLE).map(lambda steps: ("go", 0, steps)),
    st.lists(
        st.one_of(
            st.tuples(st.just("go"), st.integers(0, 3), st.integers(1, 12)),
            st.tuples(st.sampled_from([START, POST, "die"]), st.integers(0, 3), st.just(1)),
        ),
        max_size=14,
    ),
).map(lambda parts: [parts[0], *parts[1]])


async def played(steps: list[tuple[str, int, int]]) -> Shared:
    shared = Shared(SCRIPT, spec({"a.py": "x = 1\n"}, floor=0, max_turns=20, max_context_tokens=4000))
    owners = Owners(shared)
    await owners.begin()
    for what, which, times in steps:
        alive = owners.alive
        if what == START and shared.journal.records:
            await owners.begin()
        elif what == POST and shared.journal.records:
            await owners.post(MessageReceived(message_id=f"m{len(shared.journal.records)}", text="and also b"))
        elif what == "go" and alive:
            for _ in range(times):
                await owners.go_on(alive[which % len(alive)])
        elif what == "die" and alive:
            await owners.die(alive[which % len(alive)])
    await owners.end()
    return shared


def workspace(state: SessionState) -> dict[str, str]:
    environment = FolderEnvironment()
    start = spec({"a.py": "x = 1\n"}).start
    asyncio.run(environment.open("s", 0, start, state.deltas))
    return environment.files


@given(steps=STEPS)
@settings(deadline=None, max_examples=100)
def test_whoever_owns_it_when_a_session_has_one_history_and_no_effect_is_had_twice(
    steps: list[tuple[str, int, int]],
) -> None:
    shared = asyncio.run(played(steps))
    history = shared.journal.history("s")
    counted = [body for *_, body in accepted(history)]
    folded = SessionFold("s", T).apply_all(history)
    assert isinstance(folded.end, SessionCompleted) and folded.end.reason == "done"
    results = Counter(body.call_id for body in counted if isinstance(body, ToolCompleted))
    requests = Counter(body.call_id for body in counted if isinstance(body, ToolRequested))
    calls = {f"{number}.{index}" for number, size in enumerate((3, 2, 4)) for index in range(size)}
    assert results == dict.fromkeys(calls, 1) and requests == dict.fromkeys(calls, 1)
    assert workspace(folded) == {"a.py": "x = 22\n"}
    assert all(count == 1 for count in shared.effects.values()), "an external effect was had twice"
    for body in counted:
        if isinstance(body, ToolCompleted) and body.call_id in ("1.1", "2.2"):
            assert body.uncertain or shared.effects[body.call_id] == 1, "said to be done, and was not"
    consumed = Counter(message for body in counted if isinstance(body, TurnSampled) for message in body.messages)
    last_owner = next(meta.epoch for _, _, meta, body in accepted(history) if isinstance(body, SessionCompleted))
    before = {
        body.message_id for offset, *_, body in history if isinstance(body, MessageReceived) and offset < last_owner
    }
    assert set(consumed) >= before and set(consumed.values()) == {1}, "an input before its owner is in just one prompt"
    assert sequence_of("s", history).sampled == folded.sampled_tokens
