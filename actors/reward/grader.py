"""Grades one finished session in a sandbox of its own: fresh image, the session's source delta, no agent process.

Chooses by the task: hidden cases of one function, or a verifier of the task's own. Returns a `Grade`; raises
GraderCouldNotRun for any fault that is not the session's (that is `ungraded`, never a score).

Guarantee 11 (tests/GUARANTEES.md): test_reward_actor.py, test_session_runner.py, test_controller_core.py,
test_kill_each_actor.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from odradek.actors.environment.errors import SandboxError, SandboxSpecError
from odradek.actors.environment.protocol import WORKSPACE, ExecRequest, Sandbox
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward import combine, hidden_tests, verifier
from odradek.actors.reward.efficiency import Conduct
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.session.ports import start_of
from odradek.streams.errors import BlobCorrupt, BlobMissing
from odradek.streams.events.sessions import SessionFailed
from odradek.streams.events.tasks import HiddenTests, TaskPublished

GRADER = "hidden-tests"
VERSION = f"2+{combine.VERSION}"
"""Of the graders and of the combination; logged with each reward."""
GRADING_SECONDS = 20.0
"""Seconds the cases of one task may take together. Too low fails slow but right solutions; too high lets a loop hold
the grader."""
GRADE_DEADLINE_S = 200.0
"""Seconds one session's grading may take, set-up and the task's own verifier included; then it is ungraded. Too low:
honest test suites never give a reward. Too high: a stuck host holds its partition of sessions."""
OUTPUT_BYTES = 1 << 20
"""Bytes read back beside the reports of right answers. A session's prints beyond it could hide its own reports, which
then fail."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader found."""

    components: Mapping[str, float]
    total: float
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    milliseconds: float = 0.0


async def grade(task: TaskPublished, conduct: Conduct, factory: SandboxFactory) -> Grade:
    """The grade of a session that ended by itself or by a budget."""
    if isinstance(conduct.end, SessionFailed):
        raise GraderCouldNotRun(f"session failed: {conduct.end.cause}")
    if task.tests is None and task.script is None:
        raise GraderCouldNotRun("the task has neither tests nor a script to grade with", retryable=False)
    began = time.monotonic()
    start = start_of(task)
    try:
        async with asyncio.timeout(GRADE_DEADLINE_S):
            sandbox = await factory.open(start, conduct.deltas, label="grading")
            try:
                solved, passed, failed, notes = await _judge(task, sandbox)
            finally:
                await sandbox.destroy()
    except TimeoutError:
        raise GraderCouldNotRun(f"grading took longer than {GRADE_DEADLINE_S:g} s") from None
    except (SandboxError, BlobMissing, BlobCorrupt) as error:
        # A fault of the task is there at every attempt; another one of the host or the store is not.
        retryable = not isinstance(error, SandboxSpecError)
        raise GraderCouldNotRun(f"{type(error).__name__}: {error}", retryable) from error
    components = {"solved": solved, "turns": float(conduct.turns), "errors": float(conduct.errors)}
    return Grade(components, combine.total(components), passed, failed, notes, (time.monotonic() - began) * 1000)


async def _judge(task: TaskPublished, sandbox: Sandbox) -> tuple[float, list[str], list[str], list[str]]:
    if task.tests is not None:
        verdict = await _hidden(task.tests, sandbox)
        return float(verdict.solved(task.tests)), verdict.passed, verdict.failed, verdict.notes
    assert task.script is not None
    outcome = await verifier.run(task.script, sandbox)
    return outcome.reward, [], [], outcome.notes


async def _hidden(tests: HiddenTests, sandbox: Sandbox) -> hidden_tests.Verdict:
    mark = f"@{secrets.token_hex(8)} "
    plan = f".grading-{secrets.token_hex(8)}"
    await sandbox.upload({plan: hidden_tests.plan_of(tests, mark)})
    argv = tuple(hidden_tests.command(f"{WORKSPACE}/{plan}", WORKSPACE))
    output = OUTPUT_BYTES + hidden_tests.report_bytes(tests, mark)
    result = await sandbox.exec(ExecRequest(argv=argv, timeout_s=GRADING_SECONDS, max_output_bytes=output))
    return hidden_tests.judge(tests, mark, result.stdout, result.timed_out)
