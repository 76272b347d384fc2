"""The graders that history can be scored with again, by name and version. Pure over (task, session, workspace).

`hidden-tests` runs the task's tests in a sandbox that holds the session's workspace, rebuilt from image and deltas; it
is what the reward actor runs. `conduct` needs the log alone. A grader whose rule changes gets another version, and the
old one stays for as long as its verdicts are to be reproduced.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward import combine
from odradek.actors.reward.efficiency import Conduct
from odradek.actors.reward.errors import GraderCouldNotRun, UnknownGrader
from odradek.actors.reward.grader import GRADER, VERSION, Grade, grade
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.tasks import TaskPublished

UNREAD_COST = 0.1
"""Lost by a session that edited before it had read anything. Too low: guessing pays; too high: an honest one-line fix
named in the task scores below doing nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """One finished session as a grader of history gets it."""

    task: TaskPublished
    conduct: Conduct
    verdict: RewardAssigned
    """What was said of it when it ended: the outcome of its tests is on the log already."""


@dataclass(frozen=True, slots=True)
class Grader:
    """One version of one grader. `run` raises GraderCouldNotRun; with a sandbox it gets a factory."""

    name: str
    version: str
    sandbox: bool
    run: Callable[[Case, SandboxFactory | None], Awaitable[Grade]]

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


async def _hidden_tests(case: Case, factory: SandboxFactory | None) -> Grade:
    assert factory is not None
    return await grade(case.task, case.conduct, factory)


async def _conduct(case: Case, _factory: SandboxFactory | None) -> Grade:
    """The recorded outcome of the tests, less `UNREAD_COST` for an edit without evidence."""
    conduct, solved = case.conduct, case.verdict.components.get("solved")
    if solved is None:
        raise GraderCouldNotRun("its verdict has no component 'solved'", retryable=False)
    components = {
        "solved": solved,
        "turns": float(conduct.turns),
        "errors": float(conduct.errors),
        "unread": float(conduct.reads_before_edit is False),
    }
    total = combine.total(components) - UNREAD_COST * components["unread"]
    return Grade(components, total, list(case.verdict.tests_passed), list(case.verdict.tests_failed))


ALL: tuple[Grader, ...] = (
    Grader(GRADER, VERSION, True, _hidden_tests),
    Grader("conduct", f"1+{combine.VERSION}", False, _conduct),
)


def grader_of(text: str) -> Grader:
    """The grader NAME@VERSION. Raises UnknownGrader naming what there is."""
    for one in ALL:
        if str(one) == text:
            return one
    raise UnknownGrader(f"no grader {text!r} in this build; there are {', '.join(map(str, ALL))}")
