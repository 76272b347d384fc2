"""Forks (actors/session/fork.py, owned.py): a history taken over, and a session that goes on from it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.condense_world import Condenser, condensing
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

from odradek.actors.session.errors import ForkPointError
from odradek.actors.session.fork import inherited
from odradek.actors.session.runner import SessionSpec
from odradek.actors.session.state import SessionFold
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.codec import read_i32
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import (
    ContextSummarized,
    MessageReceived,
    SamplingParams,
    SessionCompleted,
    SessionFailed,
    ToolCompleted,
    TurnSampled,
)

T = template()
FILES = {"a.py": "x = 1\n", "b.py": "y = 1\n"}
READ = ("read_file", {"path": "a.py"})
EDIT = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})
OTHER = ("edit_file", {"path": "b.py", "old": "1", "new": "9"})
DONE = turn(T, done=True)
SCRIPT = [turn(T, READ), turn(T, EDIT), turn(T, READ), DONE]


async def parent() -> MemoryJournal:
    journal = MemoryJournal()
    await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), spec(FILES)).run()
    return journal


def fork(at: int, message: str = "", base: SessionSpec | None = None, opened: int = 0) -> SessionSpec:
    given = base or spec(FILES)
    body = msgspec.structs.replace(
        given.opened,
        session_id="f",
        group_id="",
        forked_from=RecordRef("sessions.v1", 0, opened),
        forked_at=at,
        sampling=SamplingParams(seed=7),
    )
    return replace(given, opened=body, message=message)


def turns(journal: MemoryJournal, session: str) -> list[TurnSampled]:
    return [body for *_, body in journal.history(session) if isinstance(body, TurnSampled)]


async def test_a_fork_goes_on_from_the_very_context_and_workspace_of_the_turn_it_branches_off_at() -> None:
    journal = await parent()
    model = ScriptedModel([*SCRIPT[:2], turn(T, READ, OTHER), DONE])
    environment = FolderEnvironment()
    await runner(journal, model, environment, fork(2)).run()
    before = turns(journal, "s")[2]
    number, asked = model.asked[0]
    context = [t for one in turns(journal, "s")[:2] for t in read_i32(one.prompt) + read_i32(one.completion)]
    assert number == 2 and asked == context + read_i32(before.prompt)
    assert environment.files == {"a.py": "x = 2\n", "b.py": "y = 9\n"}, "the parent's edit, and its own"
    assert [r.text for *_, r in journal.history("f") if isinstance(r, ToolCompleted) and r.turn == 2] == [
        "x = 2\n",
        "ok",
    ]
    ended = SessionFold("f", T).apply_all(journal.history("f"))
    assert isinstance(ended.end, SessionCompleted) and ended.end.usage.turns == 4
    assert ended.end.group_id == "" and ended.opened is not None and ended.opened.forked_at == 2


async def test_what_the_parent_sampled_is_context_in_its_fork_and_each_token_is_trained_once() -> None:
    journal = await parent()
    await runner(journal, ScriptedModel([*SCRIPT[:2], turn(T, OTHER), DONE]), FolderEnvironment(), fork(2)).run()
    made = {name: sequence_of(name, journal.history(name)) for name in ("s", "f")}
    own = [t for one in turns(journal, "f") if one.copied_from is None for t in read_i32(one.completion)]
    (segment,) = made["f"].segments
    assert [t for t, m in zip(segment.tokens, segment.mask, strict=True) if m] == own
    assert made["f"].sampled == len(own) and made["s"].sampled == sum(
        len(read_i32(t.completion)) for t in turns(journal, "s")
    )
    origins = [one.copied_from for one in turns(journal, "f")[:2]]
    offsets = [offset for offset, *_, body in journal.history("s") if isinstance(body, TurnSampled)]
    assert origins == [RecordRef("sessions.v1", 0, offset) for offset in offsets[:2]]


async def test_a_fork_at_the_end_goes_on_with_what_it_is_asked() -> None:
    journal = await parent()
    model = ScriptedModel([*SCRIPT, turn(T, OTHER), DONE])
    await runner(journal, model, FolderEnvironment(), fork(4, "now b")).run()
    assert read_i32(turns(journal, "f")[4].prompt) == T.user("now b")
    assert [t.turn for t in turns(journal, "f") if t.copied_from is None] == [4, 5]


async def test_a_fork_of_a_fork_names_who_sampled_each_turn() -> None:
    journal = await parent()
    await runner(journal, ScriptedModel([*SCRIPT[:2], turn(T, OTHER), DONE]), FolderEnvironment(), fork(2)).run()
    opened = journal.history("f")[0][0]
    second = fork(3, opened=opened)
    second = replace(second, opened=msgspec.structs.replace(second.opened, session_id="ff"))
    await runner(journal, ScriptedModel([*SCRIPT[:2], turn(T, OTHER), DONE]), FolderEnvironment(), second).run()
    assert [t.copied_from for t in turns(journal, "ff")[:2]] == [t.copied_from for t in turns(journal, "f")[:2]]
    own = next(offset for offset, *_, b in journal.history("f") if isinstance(b, TurnSampled) and b.copied_from is None)
    assert turns(journal, "ff")[2].copied_from == RecordRef("sessions.v1", 0, own)


async def test_an_owner_that_dies_in_the_middle_of_taking_a_history_over_leaves_the_rest_to_the_next() -> None:
    whole = await parent()
    begin = len(whole.records)
    model = ScriptedModel([*SCRIPT[:2], turn(T, OTHER), DONE])
    await runner(whole, model, FolderEnvironment(), fork(2)).run()
    expected = SessionFold("f", T).apply_all(whole.history("f"))
    for records in range(begin + 1, len(whole.records)):
        journal = await parent()
        journal.fail_after = records
        with pytest.raises(Killed):
            await runner(journal, model, FolderEnvironment(), fork(2)).run()
        journal.fail_after = None
        environment = FolderEnvironment()
        await runner(journal, model, environment, replace(fork(2), history_floor=0)).run(journal.history("f"))
        folded = SessionFold("f", T).apply_all(journal.history("f"))
        assert folded.context == expected.context and folded.deltas == expected.deltas
        assert len(folded.turns) == len(expected.turns) == 4


async def test_a_condensed_parent_is_forked_with_its_summary_and_no_position_is_sampled_twice() -> None:
    files = {name: f"{name} = {' + '.join(str(i * 37 % 101) for i in range(18))}\n" for name in "abcdefg"}
    script = [*(turn(T, ("read_file", {"path": name})) for name in files), DONE]
    journal, model = MemoryJournal(), Condenser(script)
    given = condensing(files)
    await runner(journal, model, FolderEnvironment(), given).run()
    whole = SessionFold("s", T).apply_all(journal.history("s"))
    assert whole.segment >= 1
    again = Condenser(script, asked=list(model.asked))
    await runner(journal, again, FolderEnvironment(), fork(len(whole.turns) - 1, base=given)).run()
    folded = SessionFold("f", T).apply_all(journal.history("f"))
    assert folded.context == whole.context and folded.position_base == whole.position_base
    copies = [body for *_, body in journal.history("f") if isinstance(body, ContextSummarized)]
    assert copies == [body for *_, body in journal.history("s") if isinstance(body, ContextSummarized)]


@pytest.mark.parametrize("at", [-1, 5])
async def test_a_fork_at_a_turn_that_is_not_there_fails_by_name(at: int) -> None:
    journal = await parent()
    with pytest.raises(ForkPointError, match="has turns 0 to 3 on the log"):
        inherited(RecordRef("sessions.v1", 0, 0), journal.history("s"), at)
    await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), fork(at)).run()
    (failed,) = [body for *_, body in journal.history("f") if isinstance(body, SessionFailed)]
    assert "can be forked at 0 to 4" in failed.cause


async def test_a_message_that_came_while_the_turn_was_sampled_is_not_in_a_fork_at_that_turn() -> None:
    """The fork holds what the parent's turn was sampled from, not what was on the log by then."""
    journal = await parent()
    rows = journal.history("s")
    at = next(i for i, row in enumerate(rows) if isinstance(row[3], TurnSampled) and row[3].turn == 2)
    late = (rows[at][0], "late", rows[1][2], MessageReceived(message_id="late", text="wait"))
    bodies = inherited(RecordRef("sessions.v1", 0, 0), [*rows[:at], late, *rows[at:]], 2)
    assert [b.message_id for b in bodies if isinstance(b, MessageReceived)] == ["0"]
