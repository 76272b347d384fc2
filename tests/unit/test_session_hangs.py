"""Guarantee 12 end to end, with something planted that hangs: the session ends with a reason that names it, the verdict
is no score, and the group goes on: a fresh attempt, and after some the group is given up with that reason.

The ports are the real ones over Ray, their deadlines made short; what hangs is the actor behind the handle. A hung
grader is in `test_reward_actor.py`, a hung command in the sandbox's contract.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.session_world import EFFECTS, MemoryJournal, ScriptedModel, spec, template, turn

from odradek.actors.controller.core import Controller
from odradek.actors.controller.groups import MAX_REPLACEMENTS
from odradek.actors.reward.efficiency import conduct_of
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.grader import grade
from odradek.actors.session import calls, clients
from odradek.actors.session import runner as runner_module
from odradek.actors.session.ports import EnvironmentInfo
from odradek.actors.session.runner import SessionRunner
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, LaneConfigured, MemberReplaced
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardUngraded
from odradek.streams.events.sessions import SessionCompleted, SessionFailed
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.events.weights import VersionPublished

TEMPLATE = template()
READ = turn(TEMPLATE, ("read_file", {"path": "a.py"}))
LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=1, attempts=2, max_staleness=1)
TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])
TASK = TaskPublished(task_id="t", instruction="x", files={"m.py": ""}, tests=TESTS, attempts=2)


class Method:
    """One remote method of an actor."""

    def __init__(self, answer: Any = None, *, hangs: bool = False) -> None:
        self._answer, self._hangs = answer, hangs

    async def remote(self, *_: Any) -> Any:
        if self._hangs:
            await asyncio.Event().wait()
        return self._answer


class Actor:
    """An actor's handle; the methods named hang for ever."""

    def __init__(self, *hanging: str) -> None:
        info = EnvironmentInfo("box", "ns", "sha")
        answers = {"open": info, "close": None, "run_calls": [], "sample": None}
        self._methods = {name: Method(answer, hangs=name in hanging) for name, answer in answers.items()}

    def __getattr__(self, name: str) -> Method:
        return self._methods[name]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that only make the test short: each still ends its own wait."""
    for module, name in (
        (runner_module, "SAMPLE_TIMEOUT_S"),
        (calls, "INFRA_DEADLINE_S"),
        (calls, "RETRY_PAUSE_S"),
        (clients, "ANSWER_GRACE_S"),
        (clients, "CALL_GRACE_S"),
        (clients, "OPEN_TIMEOUT_S"),
        (clients, "CLOSE_TIMEOUT_S"),
    ):
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, 0.05)


CASES = [
    ("model", Actor("sample"), "session s turn 0: no answer from its inference actor within "),
    ("tool", Actor("run_calls"), "the environment actor did not give the result of read_file within "),
    ("sandbox", Actor("open"), "the environment actor did not give its sandbox within "),
    ("sandbox and its end", Actor("open", "close"), "the environment actor did not give its sandbox within "),
]


@pytest.mark.parametrize(("what", "actor", "names"), CASES, ids=[case[0] for case in CASES])
async def test_what_hangs_ends_in_a_named_failure_and_the_group_goes_on(what: str, actor: Actor, names: str) -> None:
    journal = MemoryJournal()
    engine: Any = clients.RayEngine([actor]) if what == "model" else ScriptedModel([READ])
    given = spec({"a.py": ""}, tool_seconds=0)
    session = SessionRunner(
        given, template=TEMPLATE, effects=EFFECTS, journal=journal, engine=engine,
        environment=clients.RayEnvironment(actor),
    )  # fmt: skip
    await asyncio.wait_for(session.run(), 60)
    (end,) = [body for body in journal.bodies() if isinstance(body, SessionFailed | SessionCompleted)]
    assert isinstance(end, SessionFailed) and names in end.cause

    with pytest.raises(GraderCouldNotRun) as ungraded:
        await grade(TASK, conduct_of(journal.history("s")), factory=None)  # type: ignore[arg-type]
    assert names in ungraded.value.cause and ungraded.value.retryable

    core, group = opened()
    for offset in range(MAX_REPLACEMENTS + 1):
        lost = core.groups[group.group_id].members[0]
        verdict = RewardUngraded(
            session_id=lost, group_id=group.group_id, partition=0, first_offset=0, last_offset=1, grader="g",
            grader_version="1", cause=ungraded.value.cause, retryable=True,
        )  # fmt: skip
        core.on_verdict(RecordRef("rewards.v1", 0, offset), verdict)
        (decision,) = core.decide(0, 100, [0])
        core.apply_group(1 + offset, decision)
        if isinstance(decision, MemberReplaced):
            assert names in decision.cause
    assert isinstance(decision, GroupDiscarded) and decision.reason == "infrastructure" and names in decision.detail
    assert core.groups == {}


def opened() -> tuple[Controller, GroupOpened]:
    """A controller with one open group of two."""
    core = Controller(LANE)
    core.on_weights(VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="0"))
    core.on_task(RecordRef("tasks.v1", 0, 0), TASK)
    (group,) = core.decide(0, 100, [0])
    assert isinstance(group, GroupOpened)
    core.apply_group(0, group)
    return core, group
