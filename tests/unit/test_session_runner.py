"""The session's promises (actors/session/runner.py), each by its name, with the model alone scripted."""

from __future__ import annotations

import asyncio

import pytest
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

from odradek.actors.session import calls
from odradek.actors.session import runner as runner_module
from odradek.actors.session.ports import Completion
from odradek.actors.session.state import SessionFold
from odradek.streams.codec import read_i32
from odradek.streams.errors import AppendUncertain
from odradek.streams.events.sessions import (
    CancelRequested,
    EnvironmentClosed,
    EnvironmentOpened,
    MessageReceived,
    SessionCompleted,
    SessionFailed,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)

T = template()
READ = ("read_file", {"path": "a.py"})
EDIT = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})
UNKNOWN = ("grep", {"pattern": "x"})
DONE = turn(T, done=True)


def kinds(journal: MemoryJournal) -> list[str]:
    return [type(body).__name__ for body in journal.bodies()]


async def test_a_session_reads_edits_and_finishes() -> None:
    journal, environment = MemoryJournal(), FolderEnvironment()
    model = ScriptedModel([turn(T, READ), turn(T, EDIT), DONE])
    await runner(journal, model, environment, spec({"a.py": "x = 1\n"})).run()
    assert environment.files == {"a.py": "x = 2\n"}
    ends = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    assert [end.reason for end in ends] == ["done"]
    assert ends[0].usage.turns == 3 and ends[0].usage.calls == 2 and ends[0].first_offset == 0


async def test_intent_before_acting_and_result_after() -> None:
    journal, environment = MemoryJournal(), FolderEnvironment()

    def check(_call: object) -> None:
        assert isinstance(journal.bodies()[-1], ToolRequested | EnvironmentOpened)
        assert any(isinstance(body, ToolRequested) for body in journal.bodies())

    environment.hook = check
    await runner(journal, ScriptedModel([turn(T, EDIT), DONE]), environment, spec({"a.py": "1"})).run()
    after = kinds(journal)
    assert after.index("ToolRequested") < after.index("ToolCompleted")


async def test_case_opencode_44852_exactly_one_result_a_call_in_call_order_whatever_the_call_did() -> None:
    """anomalyco/opencode #44852: of two parallel calls one fails; both have a result, and the session goes on."""
    journal, environment = MemoryJournal(), FolderEnvironment()
    model = ScriptedModel([turn(T, READ, UNKNOWN), turn(T, READ), turn(T, READ), DONE])
    await runner(journal, model, environment, spec({"a.py": "x"})).run()
    first = [r for r in journal.results() if r.turn == 0]
    assert [(r.call_id, r.is_error) for r in first] == [("0.0", False), ("0.1", True)]
    assert len(model.asked) == 4


async def test_a_malformed_call_has_its_error_as_result_and_reaches_no_tool() -> None:
    journal, environment = MemoryJournal(), FolderEnvironment()
    cut = [t for t in turn(T, READ) if t != T.call("read_file", {})[-1]]
    await runner(journal, ScriptedModel([cut, DONE]), environment, spec({"a.py": "x"})).run()
    assert [r.is_error for r in journal.results()] == [True] and journal.results()[0].text.startswith("error: ")
    assert environment.runs == []


async def test_the_context_of_a_turn_is_all_earlier_tokens_plus_its_prompt() -> None:
    journal = MemoryJournal()
    model = ScriptedModel([turn(T, READ), DONE])
    await runner(journal, model, FolderEnvironment(), spec({"a.py": "x"})).run()
    seen: list[int] = []
    turns = [body for body in journal.bodies() if isinstance(body, TurnSampled)]
    for event, (_, asked) in zip(turns, model.asked, strict=True):
        assert event.position == len(seen)
        seen += read_i32(event.prompt)
        assert asked == seen
        seen += read_i32(event.completion)


async def kill_at(record: int, model: ScriptedModel, environment: FolderEnvironment) -> MemoryJournal:
    """Run until the journal holds `record` records, die there, and let a second owner finish."""
    journal = MemoryJournal(fail_after=record)
    with pytest.raises(Killed):
        await runner(journal, model, environment, spec({"a.py": "x = 1\n"})).run()
    journal.fail_after = None
    await runner(journal, model, environment, spec({"a.py": "x = 1\n"}, floor=0)).run(journal.history("s"))
    return journal


@pytest.mark.parametrize("record", range(1, 13))
async def test_a_session_survives_the_death_of_its_actor_at_any_record(record: int) -> None:
    """Guarantee 3: whatever was the last logged step, the next owner ends where an undisturbed run ends, and no call
    with a logged result is run again."""
    turns = [turn(T, READ), turn(T, EDIT), turn(T, READ, READ), DONE]
    environment = FolderEnvironment()
    journal = await kill_at(record, ScriptedModel(turns), environment)
    assert environment.files == {"a.py": "x = 2\n"}
    assert any(isinstance(body, SessionResumed) for body in journal.bodies())
    folded = SessionFold("s", T).apply_all(journal.history("s"))
    assert isinstance(folded.end, SessionCompleted) and folded.end.reason == "done"
    assert [r.call_id for r in journal.results()] == ["0.0", "1.0", "2.0", "2.1"]
    undisturbed = MemoryJournal()
    await runner(undisturbed, ScriptedModel(turns), FolderEnvironment(), spec({"a.py": "x = 1\n"})).run()
    assert folded.context == SessionFold("s", T).apply_all(undisturbed.history("s")).context


async def test_the_sandbox_of_a_dead_owner_is_closed_though_its_successor_needs_none() -> None:
    """Else it lives on until its host ends it for its age."""
    turns = [turn(T, READ), DONE]
    undisturbed = MemoryJournal()
    await runner(undisturbed, ScriptedModel(turns), FolderEnvironment(), spec({"a.py": "x = 1\n"})).run()
    last_result = max(n for n, body in enumerate(undisturbed.bodies()) if isinstance(body, ToolCompleted))
    environment = FolderEnvironment()
    journal = await kill_at(last_result + 1, ScriptedModel(turns), environment)
    assert environment.opened == 1, "the successor needed no sandbox"
    (closed,) = [body for body in journal.bodies() if isinstance(body, EnvironmentClosed)]
    assert closed.sandbox_id == "sandbox-1"
    assert journal.bodies()[-1] is closed


async def test_a_call_without_a_logged_result_runs_in_the_workspace_before_it() -> None:
    """The edit really happened in the old sandbox, but its result was never logged: it is done again from before."""
    environment = FolderEnvironment(kill_in_call=True)
    journal = MemoryJournal()
    double = ("edit_file", {"path": "a.py", "old": "x", "new": "xx"})
    model = ScriptedModel([turn(T, double), DONE])
    with pytest.raises(Killed):
        await runner(journal, model, environment, spec({"a.py": "x\n"})).run()
    assert environment.files == {"a.py": "xx\n"} and not journal.results()
    environment.kill_in_call = False
    await runner(journal, model, environment, spec({"a.py": "x\n"}, floor=0)).run(journal.history("s"))
    assert environment.files == {"a.py": "xx\n"}
    assert [e.rebuilt for e in journal.bodies() if isinstance(e, EnvironmentOpened)] == [False, True]


async def test_a_lost_sandbox_is_rebuilt_from_the_logged_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_PAUSE_S", 0.0)
    environment = FolderEnvironment()

    def lose_before_last_read(call: object) -> None:
        if environment.opened == 1 and len(environment.runs) == 1:
            environment.hook = None
            environment.files.clear()
            from odradek.actors.session.errors import EnvironmentLost

            raise EnvironmentLost("host gone")

    environment.hook = lose_before_last_read
    journal = MemoryJournal()
    model = ScriptedModel([turn(T, EDIT), turn(T, READ), DONE])
    await runner(journal, model, environment, spec({"a.py": "x = 1"})).run()
    assert environment.opened == 2 and environment.files == {"a.py": "x = 2"}
    assert journal.results()[-1].text == "x = 2"


async def test_a_fault_of_ours_is_retried_then_logged_as_failed_never_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "RETRY_PAUSE_S", 0.0)
    model = ScriptedModel([DONE], fail=3)
    journal = MemoryJournal()
    await runner(journal, model, FolderEnvironment(), spec()).run()
    assert isinstance(journal.bodies()[-1], SessionCompleted) and len(model.asked) == 4
    monkeypatch.setattr(calls, "INFRA_DEADLINE_S", 0.0)
    journal = MemoryJournal()
    environment = FolderEnvironment(lose_next=1_000_000)
    await runner(journal, ScriptedModel([turn(T, READ)]), environment, spec({"a.py": ""})).run()
    end, closed = journal.bodies()[-2:]
    assert isinstance(end, SessionFailed) and not journal.results()
    assert isinstance(closed, EnvironmentClosed), "the sandbox that was lost is given up, too"


async def test_a_zombie_owner_changes_nothing() -> None:
    """Guarantee 3: what an older owner writes after a newer one began is ignored by the fold."""
    journal, model = MemoryJournal(), ScriptedModel([turn(T, READ), DONE])
    zombie = runner(journal, model, FolderEnvironment(), spec({"a.py": "x"}))
    journal.fail_after = 3
    with pytest.raises(Killed):
        await zombie.run()
    journal.fail_after = None
    await runner(journal, model, FolderEnvironment(), spec({"a.py": "x"}, floor=0)).run(journal.history("s"))
    before = SessionFold("s", T).apply_all(journal.history("s"))
    await zombie._loop()  # it wakes up and believes that it still owns the session
    after = SessionFold("s", T).apply_all(journal.history("s"))
    assert len(journal.records) > before.last_offset + 1
    assert after.context == before.context and after.end == before.end
    assert after.rule.ignored > before.rule.ignored


async def test_cancel_ends_the_session_at_the_next_step() -> None:
    journal, environment = MemoryJournal(), FolderEnvironment()
    one = runner(journal, ScriptedModel([turn(T, READ)]), environment, spec({"a.py": "x"}, max_turns=100))
    sent: list[asyncio.Task[None]] = []

    def cancel(_call: object) -> None:
        environment.hook = None
        sent.append(asyncio.create_task(one.post(CancelRequested(request_id="c", reason="group closed"))))
        environment.delay = True

    environment.hook = cancel
    await one.run()
    ends = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    assert [end.reason for end in ends] == ["cancelled"] and ends[0].usage.turns == 1


async def test_a_session_that_is_called_off_does_not_wait_for_its_turn() -> None:
    """A person's Ctrl-C, or the end of a group, while a long turn is sampled or the engine does not answer."""
    asked, stopped = asyncio.Event(), asyncio.Event()

    class Silent(ScriptedModel):
        async def sample(self, *, turn: int, tokens: list[int], **_: object) -> Completion:
            asked.set()
            try:
                return await asyncio.Future()
            finally:
                stopped.set()

    journal = MemoryJournal()
    one = runner(journal, Silent([]), FolderEnvironment(), spec({"a.py": "x"}))
    running = asyncio.create_task(one.run())
    await asyncio.wait_for(asked.wait(), 30)
    await one.post(CancelRequested(request_id="c", reason="group closed"))
    await asyncio.wait_for(running, 30)
    ends = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    assert [end.reason for end in ends] == ["cancelled"] and stopped.is_set()


async def test_case_temporal_673_a_message_that_arrives_while_tools_run_comes_after_their_results() -> None:
    """temporalio/sdk-python #673: the order on the log is the order in the prompt, live and folded alike."""
    journal, environment = MemoryJournal(), FolderEnvironment()
    one = runner(journal, ScriptedModel([turn(T, READ, READ), DONE, DONE]), environment, spec({"a.py": "x"}))
    sent: list[asyncio.Task[None]] = []

    def send(_call: object) -> None:
        environment.hook = None
        sent.append(asyncio.create_task(one.post(MessageReceived(message_id="m", text="also b"))))
        environment.delay = True

    environment.hook = send
    await one.run()
    second = [body for body in journal.bodies() if isinstance(body, TurnSampled)][1]
    assert second.messages == ["m"]
    assert read_i32(second.prompt) == T.results(["x", "x"]) + T.user("also b")


@pytest.mark.parametrize(
    ("budget", "turns", "reason"),
    [
        ({"max_turns": 2}, [turn(T, READ)], "turns"),
        ({"max_context_tokens": 40}, [turn(T, READ)], "context"),
        ({}, [turn(T)], "no_call"),
    ],
)
async def test_every_budget_ends_the_session_with_its_name(
    budget: dict[str, int], turns: list[list[int]], reason: str
) -> None:
    journal = MemoryJournal()
    await runner(journal, ScriptedModel(turns), FolderEnvironment(), spec({"a.py": "x"}, **budget)).run()
    ends = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    assert [end.reason for end in ends] == [reason]


async def test_results_are_logged_before_the_next_turn_is_sampled() -> None:
    journal = MemoryJournal()
    await runner(journal, ScriptedModel([turn(T, READ), DONE]), FolderEnvironment(), spec({"a.py": "x"})).run()
    order = [b for b in journal.bodies() if isinstance(b, TurnSampled | ToolCompleted)]
    assert [type(b).__name__ for b in order] == ["TurnSampled", "ToolCompleted", "TurnSampled"]


async def test_an_error_nobody_foresaw_ends_the_session_once_with_its_cause() -> None:
    journal, environment = MemoryJournal(), FolderEnvironment()

    def break_down(_call: object) -> None:
        raise OSError("name too long: " + "n" * 100_000)

    environment.hook = break_down
    with pytest.raises(OSError, match="name too long"):
        await runner(journal, ScriptedModel([turn(T, READ)]), environment, spec({"a.py": "1"})).run()
    ends = [body for body in journal.bodies() if isinstance(body, SessionFailed)]
    assert len(ends) == 1 and ends[0].cause.startswith("unexpected OSError: name too long")
    assert len(ends[0].cause) == runner_module.CAUSE_CHARACTERS
    before = len(journal.records)
    await runner(journal, ScriptedModel([DONE]), environment, spec(floor=0)).run(journal.history("s"))
    assert len(journal.records) == before, "the next owner finds the end and does nothing"


async def test_a_log_that_does_not_answer_is_no_failure_of_the_session() -> None:
    """Its next owner goes on from what is on the log."""
    journal, environment = MemoryJournal(), FolderEnvironment()

    def unanswered(_call: object) -> None:
        raise AppendUncertain("no acknowledgement")

    environment.hook = unanswered
    with pytest.raises(AppendUncertain):
        await runner(journal, ScriptedModel([turn(T, READ), DONE]), environment, spec({"a.py": "1"})).run()
    assert not [body for body in journal.bodies() if isinstance(body, SessionFailed)]
    environment.hook = None
    again = runner(journal, ScriptedModel([turn(T, READ), DONE]), environment, spec({"a.py": "1"}, floor=0))
    await again.run(journal.history("s"))
    assert [type(body) for body in journal.bodies()].count(SessionCompleted) == 1
