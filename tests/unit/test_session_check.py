"""A session's records against its state machine (actors/session/check.py): as written they pass, tampered they stop."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable

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

from odradek.actors.session.check import check
from odradek.actors.session.errors import ReplayDivergence
from odradek.actors.session.state import SessionFold, SessionState
from odradek.streams.codec import i32
from odradek.streams.events.sessions import (
    MessageReceived,
    SessionEvent,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.ownership import SessionRecord

T = template()
READ = ("read_file", {"path": "a.py"})
EDIT = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})
DONE = turn(T, done=True)
SCRIPT = [turn(T, READ, READ), turn(T, READ, EDIT, READ), DONE, DONE]


def checked(records: list[SessionRecord]) -> SessionState:
    return check("s", records, T, topic="sessions.v1", partition=3)


async def overlapping() -> list[SessionRecord]:
    """Case temporalio/sdk-python #673: a message comes while two calls run; the host dies once, too."""
    journal, environment = MemoryJournal(), FolderEnvironment()
    given = spec({"a.py": "x = 1"})
    one = runner(journal, ScriptedModel(SCRIPT), environment, given)
    sent: list[asyncio.Task[None]] = []

    def send(_call: object) -> None:
        environment.hook = None
        sent.append(asyncio.create_task(one.post(MessageReceived(message_id="m", text="also b"))))
        environment.delay = True

    environment.hook = send
    journal.fail_after = 14
    with pytest.raises(Killed):
        await one.run()
    journal.fail_after = None
    await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), spec({"a.py": "x = 1"}, floor=0)).run(
        journal.history("s")
    )
    return journal.history("s")


def of(records: list[SessionRecord], kind: type[SessionEvent], which: int = 0) -> int:
    return [i for i, record in enumerate(records) if isinstance(record[3], kind)][which]


async def test_case_temporal_673_a_log_as_it_was_written_passes_and_folds_to_the_same_prompts() -> None:
    records = await overlapping()
    assert any(isinstance(record[3], SessionResumed) for record in records)
    state, folded = checked(records), SessionFold("s", T).apply_all(records)
    assert state.end is not None and state.context == folded.context
    assert [turn.event for turn in state.turns] == [turn.event for turn in folded.turns]


@pytest.mark.parametrize("record", range(1, 20))
async def test_a_log_whose_owner_died_at_any_record_passes(record: int) -> None:
    journal, given = MemoryJournal(fail_after=record), spec({"a.py": "x = 1"})
    try:
        await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), given).run()
    except Killed:
        journal.fail_after = None
        await runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), spec({"a.py": "x = 1"}, floor=0)).run(
            journal.history("s")
        )
    assert checked(journal.history("s")).end is not None


async def test_a_condensed_session_passes() -> None:
    journal = MemoryJournal()
    files = {name: f"{name} = 1\n" * 8 for name in "abcdefg"}
    model = Condenser([*(turn(T, ("read_file", {"path": name})) for name in files), DONE])
    await runner(journal, model, FolderEnvironment(), condensing(files)).run()
    assert checked(journal.history("s")).segment > 0


async def test_a_record_that_was_appended_again_is_no_divergence() -> None:
    """The same id again, also a group of records of which the last landed first: what a retried append leaves."""
    records = await overlapping()
    at = of(records, ToolCompleted)
    end = len(records)
    assert checked([*records, (end, *records[at][1:])]).end is not None
    early = [(at - 0.5, *records[at + 1][1:])]  # result 0.1 before 0.0, and then both in order
    assert checked([*records[:at], *early, *records[at:]]).end is not None  # type: ignore[list-item]


def swap(records: list[SessionRecord], i: int) -> None:
    (a, *first), (b, *second) = records[i], records[i + 1]
    records[i : i + 2] = [(a, *second), (b, *first)]  # type: ignore[list-item]


def double(records: list[SessionRecord], i: int) -> None:
    """The record once more, under an id of its own, in the place of the next one."""
    offset, identifier, meta, body = records[i]
    records.insert(i + 1, (offset + 1, identifier + "x", meta, body))


def renumbered(records: list[SessionRecord], i: int) -> None:
    """Doubled by one who counts: numbers of what follows in the epoch fit again."""
    double(records, i)
    epoch = records[i][2].epoch
    for j in range(i + 1, len(records)):
        offset, identifier, meta, body = records[j]
        if meta.epoch == epoch:
            records[j] = (offset, identifier, msgspec.structs.replace(meta, seq=meta.seq + 1), body)


def other_prompt(records: list[SessionRecord], i: int) -> None:
    offset, identifier, meta, body = records[i]
    assert isinstance(body, TurnSampled)
    records[i] = (offset, identifier, meta, msgspec.structs.replace(body, prompt=i32([1, 2])))


Tamper = Callable[[list[SessionRecord], int], object]


@pytest.mark.parametrize(
    ("tamper", "kind", "which", "later", "expected"),
    [
        (swap, ToolCompleted, 0, 0, "number"),
        (swap, ToolRequested, 0, 0, "number"),
        (list.pop, ToolRequested, 0, 0, "number"),
        (list.pop, ToolCompleted, 1, None, "number"),
        (list.pop, TurnSampled, 0, 0, "number"),
        (list.pop, SessionResumed, 0, 0, "takeover"),
        (list.pop, MessageReceived, 0, 0, "a message"),
        (list.pop, MessageReceived, 1, None, "turn 1"),
        (double, ToolCompleted, 0, 1, "number"),
        (renumbered, ToolCompleted, 0, 1, "the result of call 0.1"),
        (renumbered, TurnSampled, 0, 1, "call 0.0 read_file, 0.1 read_file"),
        (other_prompt, TurnSampled, 1, 0, "turn 1"),
    ],
)
async def test_a_tampered_log_stops_where_it_diverges(
    tamper: Tamper, kind: type[SessionEvent], which: int, later: int | None, expected: str
) -> None:
    """`later`: places after the tampered one; None where another kind of record lies between."""
    records = await overlapping()
    at = of(records, kind, which)
    tamper(records, at)
    with pytest.raises(ReplayDivergence) as stopped:
        checked(records)
    error = stopped.value
    assert (error.topic, error.partition) == ("sessions.v1", 3)
    assert expected in error.expected
    if later is not None:
        assert error.offset == records[at + later][0]
    assert f"sessions.v1/3@{error.offset}" in str(error) and error.found in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
