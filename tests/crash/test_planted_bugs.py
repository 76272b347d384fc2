"""A bug planted in each guarantee is caught by the harness's checks, and the sound code raises no alarm.

Each bug replaces one decision of the product in this process only (`monkeypatch`); nothing in the product knows of it.
Here the parts that need no service; the others are in `test_planted_bugs_on_a_broker.py` and, of what people and
auditors rely on, in `test_planted_bugs_of_keys.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from support.crash import tokens
from support.crash.planted import caught
from support.crash.world import Answer, Seen, World
from support.run_log import small_run
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

from odradek.actors.controller.core import Controller
from odradek.actors.inference import engine as engine_module
from odradek.actors.inference.types import SampleRequest
from odradek.actors.inference.weights import build
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy
from odradek.actors.session import calls
from odradek.actors.session.runner import SessionRunner
from odradek.actors.session.state import CallState, SessionState
from odradek.actors.trainer.testing import TINY
from odradek.kernels.numerics import numerics_id
from odradek.streams.codec import f32, i32
from odradek.streams.envelope import Record
from odradek.streams.events.groups import GroupOpened, LaneConfigured
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import SessionEvent, SessionOpened, ToolCompleted, TurnSampled, WeightSpan
from odradek.streams.ownership import OwnerRule
from odradek.streams.projections.tables import TABLES, Rows, Stored, Table
from odradek.streams.projections.views import snapshot

T = template()
READ = ("read_file", {"path": "a.py"})
EDIT = ("edit_file", {"path": "a.py", "old": "1", "new": "2"})
SAID = [turn(T, READ, READ), turn(T, EDIT), turn(T, done=True)]
FILES = {"a.py": "x = 1\n"}


def sessions(journal: MemoryJournal) -> World:
    """A world of sessions alone, as the journal holds them; no weights are published in it."""
    rows = [
        Seen(RecordRef("sessions.v1", 0, offset), session, identifier, meta, body)
        for session, offset, identifier, meta, body in journal.records
    ]
    return World({"sessions.v1": rows})


async def resumed_after(records: int) -> MemoryJournal:
    """The owner dies when so many records are on the log; another one finishes."""
    journal, environment, model = MemoryJournal(fail_after=records), FolderEnvironment(), ScriptedModel(SAID)
    with pytest.raises(Killed):
        await runner(journal, model, environment, spec(FILES)).run()
    journal.fail_after = None
    await runner(journal, model, environment, spec(FILES, floor=0)).run(journal.history("s"))
    return journal


def at(journal: MemoryJournal, nth: int) -> int:
    """How many records there are when the nth result has just been logged."""
    return [n for n, row in enumerate(journal.records) if isinstance(row[4], ToolCompleted)][nth] + 1


# -- resume -----------------------------------------------------------------------------------------------------------

RUN_AGAIN = ("resume", "no_call_with_a_logged_result_runs_again")
NOT_REBUILT = ("resume", "each_owner_rebuilds_the_workspace_first")


async def whole() -> MemoryJournal:
    journal = MemoryJournal()
    await runner(journal, ScriptedModel(SAID), FolderEnvironment(), spec(FILES)).run()
    return journal


async def test_a_call_with_a_logged_result_that_runs_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    where = at(await whole(), 0)
    assert RUN_AGAIN not in caught(sessions(await resumed_after(where)))

    def every_call(state: SessionState) -> list[CallState]:
        """The bug: a fresh owner takes the calls of the newest turn for open until it has logged a result itself."""
        calls = state.turns[-1].calls if state.turns else []
        return [call for call in calls if call.result is None or state.rule.next_seq == 0]

    monkeypatch.setattr(SessionState, "open_calls", property(every_call))
    assert RUN_AGAIN in caught(sessions(await resumed_after(where)))


async def test_an_owner_that_works_on_without_rebuilding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    where = at(await whole(), 0)
    assert NOT_REBUILT not in caught(sessions(await resumed_after(where)))

    async def nothing(self: calls.ToolCalls) -> None:
        self._environment_ready = True

    journal, environment, model = MemoryJournal(fail_after=where), FolderEnvironment(), ScriptedModel(SAID)
    with pytest.raises(Killed):
        await runner(journal, model, environment, spec(FILES)).run()
    journal.fail_after = None
    monkeypatch.setattr(calls.ToolCalls, "_open_environment", nothing)
    await runner(journal, model, environment, spec(FILES, floor=0)).run(journal.history("s"))
    assert NOT_REBUILT in caught(sessions(journal))


async def test_a_former_owner_that_is_listened_to_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zombie's turn lands after its successor has taken over."""
    journal = await resumed_after(at(await whole(), 0))
    session, _, _, meta, body = next(row for row in journal.records if isinstance(row[4], ToolCompleted))
    last = journal.records.pop()  # the sandbox's end: something of the zombie's comes before it
    zombie = Meta(epoch=meta.epoch, seq=meta.seq + 1)
    journal.records += [
        (session, len(journal.records), "zombie", zombie, body),
        (last[0], len(journal.records) + 1, *last[2:]),
    ]
    which = ("one history", "one_owner_at_a_time_speaks_for_a_session")
    assert which not in caught(sessions(journal))

    def gullible(rule: OwnerRule, offset: int, event_id: str, meta: Meta, body: SessionEvent) -> bool:
        return True

    monkeypatch.setattr(OwnerRule, "_accepts", gullible)
    assert which in caught(sessions(journal))


# -- nothing waits for ever -------------------------------------------------------------------------------------------


async def test_a_session_that_gives_up_without_saying_so_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "INFRA_DEADLINE_S", 0.0)
    monkeypatch.setattr(calls, "RETRY_PAUSE_S", 0.0)

    async def without_an_engine() -> World:
        journal = MemoryJournal()
        await runner(journal, ScriptedModel(SAID, fail=1000), FolderEnvironment(), spec(FILES)).run()
        return sessions(journal)

    which = ("nothing waits for ever", "every_session_ends_with_a_reason")
    assert which not in caught(await without_an_engine())
    append = SessionRunner._append_owner

    async def silent(self: SessionRunner, step: str, bodies: list[SessionEvent]) -> None:
        if step != "failed":
            await append(self, step, bodies)

    monkeypatch.setattr(SessionRunner, "_append_owner", silent)
    assert which in caught(await without_an_engine())


def test_a_controller_that_forgets_its_open_groups_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2)
    opened = GroupOpened(
        group_id="00000000-0000-0000-0000-000000000001", lane="main-0", ordinal=0, task=RecordRef("tasks.v1", 0, 0),
        task_id="t", task_digest="d", purpose="rl", policy="demo", sessions=["a", "b"], version=0, deadline_ms=2**53,
    )  # fmt: skip

    def restarted() -> World:
        """A controller that finds one open group whose members have their verdicts, and decides."""
        controller = Controller(lane)
        controller.apply_group(0, opened)
        controller.recovered()
        for number, session in enumerate(opened.sessions):
            reward = RewardAssigned(
                session_id=session, group_id=opened.group_id, partition=0, first_offset=0, last_offset=1, grader="g",
                grader_version="1", components={"solved": float(number)}, total=float(number),
            )  # fmt: skip
            controller.on_verdict(RecordRef("rewards.v1", 0, number), reward)
        events = [opened, *controller.decide(0, 0, [])]
        rows = [Seen(RecordRef("groups.v1", 0, n), "main-0", str(n), Meta(), event) for n, event in enumerate(events)]
        return World({"groups.v1": rows})

    which = ("nothing waits for ever", "every_group_is_closed_once")
    assert which not in caught(restarted())
    monkeypatch.setattr(Controller, "recovered", lambda self: self.groups.clear())
    assert which in caught(restarted())


# -- one history ------------------------------------------------------------------------------------------------------


def test_a_table_that_counts_a_repeated_event_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    records = small_run(versions=1, groups=3, evaluations=1).records

    def folded(given: Iterable[Record]) -> object:
        tables: dict[str, Rows] = {table.name: {} for table in TABLES}
        for record in given:
            for table in TABLES:
                if record.ref.topic == table.topic.name:
                    table.step(tables[table.name], record)
        return snapshot(tables)

    meant = folded(records)

    def answers() -> World:
        return World({}, answers=[Answer("projections", "tables", folded([*records, *records]), meant)])

    which = ("one history", "answers_are_folds_of_the_log")
    assert which not in caught(answers())
    read: Callable[[Table, bytes], Stored] = Table.read  # type: ignore[type-arg]

    def forgetful(self: Table, raw: bytes) -> Stored:  # type: ignore[type-arg]
        return Stored(offset=-1, row=read(self, raw).row)

    monkeypatch.setattr(Table, "read", forgetful)
    assert which in caught(answers())


# -- same numbers -----------------------------------------------------------------------------------------------------


def test_a_log_probability_that_depends_on_the_company_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same attempt alone, and with another one beside it."""

    def sampled() -> World:
        return World({"sessions.v1": [*together(0, "alone"), *together(40, "one", "two")]})

    which = ("same numbers", "the_same_tokens_have_the_same_bits")
    assert which not in caught(sampled())
    assert len(list(tokens.sampled(sampled()))) == 3 * TOKENS
    once = engine_module.row_logits

    def fast(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The bug: several rows take a faster way than one alone."""
        return once(rows, weight) if len(rows) == 1 else (rows.bfloat16() @ weight.bfloat16().T).float()

    monkeypatch.setattr(engine_module, "row_logits", fast)
    assert which in caught(sampled())


TOKENS = 8
"""Tokens of each of these turns."""


def together(first: int, *names: str) -> list[Seen]:
    """The records of sessions whose only turns one engine sampled side by side, all from one prompt and one seed."""
    torch.set_num_threads(1)
    engine = engine_module.Engine(TINY, numerics_id())
    engine.install(build(TINY, 1, to_hf_state(Policy(TINY, seed=1))))
    prompt, done, rows = list(range(5, 25)), [], []
    for name in names:
        engine.add(
            SampleRequest(
                request_id=name, session_id=name, epoch=0, prompt_tokens=prompt, max_new_tokens=TOKENS,
                stop_ids=frozenset(), temperature=1.0, seed=3, deadline=1e18,
            )
        )  # fmt: skip
    while not engine.idle:
        done += engine.step().finished
    for number, result in enumerate(done):
        offset, name = first + 2 * number, result.session_id
        said = TurnSampled(
            turn=0, position=0, prompt=i32(prompt), completion=i32(result.tokens), logprobs=f32(result.logprobs),
            spans=[WeightSpan(*span) for span in result.weight_spans], numerics_id=result.numerics_id,
            finish_reason=result.finish_reason,
        )  # fmt: skip
        bodies = [(SessionOpened(session_id=name, policy="p"), Meta()), (said, Meta(epoch=offset, seq=0))]
        rows += [
            Seen(RecordRef("sessions.v1", 0, offset + n), name, f"{name} {n}", meta, body)
            for n, (body, meta) in enumerate(bodies)
        ]
    return rows
