"""Taking a session over (actors/session/owned.py, runner.py): each situation by name, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.owners_world import DEPLOY, EXTERNAL, Owners, Shared
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
from odradek.actors.session.calls import UNCERTAIN
from odradek.actors.session.errors import EnvironmentLost, SuperfluousOwner
from odradek.actors.session.owned import OwnedSession
from odradek.actors.session.ports import Call
from odradek.actors.session.runner import SessionRunner
from odradek.actors.session.state import SessionFold
from odradek.streams.events.sessions import (
    CancelRequested,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.ownership import accepted

T = template()
READ = ("read_file", {"path": "a.py"})
OUT = (DEPLOY, {"command": "deploy"})
DONE = turn(T, done=True)
FILES = {"a.py": "x = 1\n"}


def world(*turns: list[int]) -> Owners:
    return Owners(Shared([*turns, DONE], spec(FILES, floor=0)))


def counted(owners: Owners, kind: type[SessionEvent]) -> list[SessionEvent]:
    return [body for *_, body in accepted(owners.shared.journal.history("s")) if isinstance(body, kind)]


async def until(owners: Owners, kind: type[SessionEvent]) -> None:
    """The first owner goes on until it has just logged an event of that kind."""
    first = owners.all[0]
    while not counted(owners, kind):
        await owners.go_on(first)


async def test_append_it_fold_up_to_it_then_act_what_a_former_owner_still_wrote_is_seen() -> None:
    """It read the history; then the old owner logs a turn and a user asks for more; then it takes over."""
    owners = world(turn(T, READ))
    first = await owners.begin()
    await until(owners, MessageReceived)
    second = await owners.begin()  # has read the history, and has not said yet that it takes over
    await until(owners, TurnSampled)
    await owners.post(MessageReceived(message_id="m", text="and b"))
    await owners.go_on(second)
    await owners.die(first)
    await owners.finish(second)
    turns = counted(owners, TurnSampled)
    assert [t.turn for t in turns] == [0, 1] and turns[1].messages == ["m"]  # type: ignore[attr-defined]
    assert [*second.runner.state.messages] == ["0", "m"]
    folded = SessionFold("s", T).apply_all(owners.shared.journal.history("s"))
    assert folded.context == second.runner.state.context and folded.end == second.runner.state.end


async def test_of_two_successors_at_once_the_later_one_goes_on_and_the_other_stops() -> None:
    owners = world(turn(T, READ, READ), turn(T, READ))
    first = await owners.begin()
    await until(owners, TurnSampled)
    await owners.die(first)
    one, two = await owners.begin(), await owners.begin()
    await owners.go_on(one)
    await owners.go_on(two)
    while not (one.task.done() and two.task.done()):
        for owner in (one, two):
            await owners.go_on(owner)
    assert len(counted(owners, SessionResumed)) == 2 and len(counted(owners, SessionCompleted)) == 1
    assert two.runner.state.end is not None and one.runner.state.end is None, "the earlier one stopped by itself"
    assert [r.call_id for r in counted(owners, ToolCompleted)] == ["0.0", "0.1", "1.0"]  # type: ignore[attr-defined]


async def test_the_same_step_of_two_owners_counts_once_each_call_is_requested_once() -> None:
    """One of three requests had landed: the next owner asks for the other two under names of their own."""
    undisturbed = MemoryJournal()
    model = ScriptedModel([turn(T, READ, READ, READ), DONE])
    await runner(undisturbed, model, FolderEnvironment(), spec(FILES)).run()
    for records in range(3, len(undisturbed.records)):
        journal = MemoryJournal(fail_after=records)
        with pytest.raises(Killed):
            await runner(journal, model, FolderEnvironment(), spec(FILES)).run()
        journal.fail_after = None
        await runner(journal, model, FolderEnvironment(), spec(FILES, floor=0)).run(journal.history("s"))
        bodies = [body for *_, body in accepted(journal.history("s"))]
        for kind in (ToolRequested, ToolCompleted):
            assert [b.call_id for b in bodies if isinstance(b, kind)] == ["0.0", "0.1", "0.2"], (kind, records)


# -- external effects -------------------------------------------------------------------------------------------------


async def test_an_external_effect_is_never_repeated_silently_after_its_owner_died() -> None:
    owners = world(turn(T, OUT))
    first = await owners.begin()
    while not owners.shared.effects:
        await owners.go_on(first)
    await owners.end()
    (result,) = counted(owners, ToolCompleted)
    assert owners.shared.effects == {"0.0": 1}
    assert isinstance(result, ToolCompleted) and result.uncertain and result.is_error and result.text == UNCERTAIN
    assert len(counted(owners, SessionCompleted)) == 1, "the model is told, and the session goes on"


async def test_a_zombie_that_was_succeeded_before_it_asked_has_no_external_effect() -> None:
    """Its request is on the log after its successor's beginning, so it does not count, and the environment does not
    know the successor yet: only reading the log up to its own request tells it."""
    owners = world(turn(T, OUT))
    zombie = await owners.begin()
    await until(owners, TurnSampled)
    heir = await owners.begin()
    while not counted(owners, SessionResumed):
        await owners.go_on(heir)
    await owners.finish(zombie)
    assert owners.shared.effects == {}
    await owners.finish(heir)
    assert owners.shared.effects == {"0.0": 1}
    (result,) = counted(owners, ToolCompleted)
    assert isinstance(result, ToolCompleted) and not result.uncertain and result.text == "deployed"


async def test_an_external_call_whose_environment_was_lost_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody died: the answer alone is missing. A call without such an effect is simply made again."""
    monkeypatch.setattr(calls, "RETRY_PAUSE_S", 0.0)
    for name, again in ((DEPLOY, False), ("read_file", True)):
        environment, asked = FolderEnvironment(), list[str]()

        def lose(call: Call, asked: list[str] = asked, environment: FolderEnvironment = environment) -> None:
            asked.append(call.call_id)
            environment.hook = None
            raise EnvironmentLost("host gone")

        environment.hook = lose
        journal = MemoryJournal()
        model = ScriptedModel([turn(T, (name, {"path": "a.py"} if again else {"command": "deploy"})), DONE])
        one = SessionRunner(
            spec(FILES), template=T, effects=EXTERNAL, journal=journal, engine=model, environment=environment
        )
        await one.run()
        (result,) = journal.results()
        assert result.uncertain is not again and environment.runs == (["0.0"] if again else []) and asked == ["0.0"]


async def test_what_an_owner_has_said_is_known_to_count_once_it_is_confirmed() -> None:
    journal = MemoryJournal()
    one = OwnedSession(spec(FILES), template=T, journal=journal)
    await one.take([])
    await one.confirm()
    two = OwnedSession(spec(FILES, floor=0), template=T, journal=journal)
    await two.take(journal.history("s"))
    await two.confirm()
    await one.post(MessageReceived(message_id="late", text="x"))
    with pytest.raises(SuperfluousOwner):
        await one.confirm()


@pytest.mark.parametrize("begun", [False, True])
async def test_of_a_session_that_is_only_handed_over_to_be_ended_nothing_is_sampled_or_run_any_more(
    begun: bool,
) -> None:
    """Whatever there is of it, it ends with the reason; handed over once more, it is left alone."""
    journal, environment = MemoryJournal(), FolderEnvironment()
    given = spec(FILES, floor=0)
    if begun:
        journal.fail_after = 4  # its host dies in the middle
        with pytest.raises(Killed):
            await runner(journal, ScriptedModel([turn(T, READ), DONE]), environment, given).run()
        journal.fail_after = None
    before, ran = len(journal.records), list(environment.runs)
    model = ScriptedModel([DONE])
    for _ in range(2):
        ending = runner(journal, model, environment, replace(given, cancelled="its group was closed"))
        await ending.run(journal.history("s"))
    story = [body for *_, body in accepted(journal.history("s"))]
    assert isinstance(story[-1], SessionCompleted) and story[-1].reason == "cancelled"
    assert [body.reason for body in story if isinstance(body, CancelRequested)] == ["its group was closed"]
    assert model.asked == [] and environment.runs == ran
    assert len(journal.records) - before == (3 if begun else 4)
