"""Whether a task's own reference solution passes its tests every time: real sandboxes, the real grader, no service.

A test that passes only sometimes would reward luck, so such a task is quarantined, with the tally of each test. Each
run grades in a fresh sandbox. Not a command of its own: `odradek task check` calls it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from odradek.actors.environment.logged import to_logged
from odradek.actors.environment.ns import NsDriver
from odradek.actors.environment.protocol import ExecRequest
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward.efficiency import Conduct
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.grader import grade
from odradek.actors.session.ports import start_of
from odradek.actors.tasks.errors import TaskNotPublishable
from odradek.actors.tasks.refusal import refusal
from odradek.actors.tasks.spec import SHELL, TaskSpec
from odradek.sandbox_images.store import ImageStore
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.events.sessions import FileChange, SessionCompleted, Usage, WorkspaceDelta
from odradek.streams.events.tasks import TaskPublished

SOLVE = "solve.sh"
"""Harbor's form of a reference solution: a script run in the workspace. Any other file of solution/ replaces the
workspace's file of that path."""
SOLVE_SECONDS = 300.0
"""Seconds the script may take."""

Verdict = Literal["admitted", "quarantined", "refused"]


class TaskCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What the gradings of one task showed."""

    task_id: str
    verdict: Verdict
    reason: str
    runs: int
    solved: int
    """Runs in which the reference solution passed everything."""
    tests: dict[str, int] = {}
    """By test id the runs in which it passed."""
    causes: dict[str, int] = {}
    """Why runs could not be graded, counted."""
    untouched_solved: bool = False

    def text(self) -> str:
        """For a person: the verdict, and the tally where it matters."""
        lines = [f"{self.verdict}  {self.task_id}: {self.reason}"]
        if self.verdict != "admitted":
            lines += [f"    {count}/{self.runs}  {test}" for test, count in sorted(self.tests.items(), key=_rarest)]
            lines += [f"    {count}/{self.runs} could not be graded: {cause}" for cause, count in self.causes.items()]
        return "\n".join(lines)


def _rarest(item: tuple[str, int]) -> tuple[int, str]:
    return item[1], item[0]


async def check_tasks(specs: Sequence[TaskSpec], runs: int, root: Path, tell: Callable[[str], None]) -> list[TaskCheck]:
    """Each task's check, in order; images are kept below `root`. Faults of the host are raised; faults of a task are
    its result."""
    state = root / "sandboxes" / f"task-check-{os.getpid()}"
    images = ImageStore(root / "images")
    driver = NsDriver(state, images)
    await driver.start()
    try:
        blobs = BlobStore(MemoryStore())
        factory = SandboxFactory(driver, images, blobs)
        results = []
        for number, spec in enumerate(specs, 1):
            tell(f"{spec.name}, {number} of {len(specs)}")
            await factory.image_digest(spec.image)
            if not spec.inline:
                await blobs.put(spec.tar())
            results.append(await check_task(spec, runs, factory))
        return results
    finally:
        await driver.close()
        await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)


async def check_task(spec: TaskSpec, runs: int, factory: SandboxFactory) -> TaskCheck:
    """Grade the untouched workspace once and the solution `runs` times."""
    try:
        task = spec.published()
    except TaskNotPublishable as error:
        return _refused(spec, str(error))
    if fault := refusal(task):
        return _refused(spec, fault)
    if not spec.solution:
        return _refused(spec, "has no solution/ to check its tests with")
    try:
        solution = await _solution(spec, task, factory)
    except GraderCouldNotRun as error:
        return _refused(spec, error.cause)
    untouched, _, _ = await _graded(task, [], factory)
    solved, tests, causes = 0, Counter(dict.fromkeys(_ids(task), 0)), Counter[str]()
    for _ in range(runs):
        ok, passed, cause = await _graded(task, [solution], factory)
        solved += ok
        tests.update(passed)
        causes.update([cause] if cause else [])
    verdict, reason = _verdict(runs, solved, untouched)
    return TaskCheck(
        task_id=spec.name,
        verdict=verdict,
        reason=reason,
        runs=runs,
        solved=solved,
        tests=dict(tests),
        causes=dict(causes),
        untouched_solved=untouched,
    )


def _verdict(runs: int, solved: int, untouched: bool) -> tuple[Verdict, str]:
    if untouched:
        return "refused", "the untouched workspace already passes"
    if solved == runs:
        return "admitted", f"the solution passed {solved} of {runs} runs, the untouched workspace did not"
    if solved:
        return "quarantined", f"flaky: the solution passed {solved} of {runs} runs"
    return "refused", f"the solution passed none of {runs} runs"


def _refused(spec: TaskSpec, reason: str) -> TaskCheck:
    return TaskCheck(task_id=spec.name, verdict="refused", reason=reason, runs=0, solved=0)


def _ids(task: TaskPublished) -> list[str]:
    return [case.id for case in task.tests.cases] if task.tests is not None else []


async def _graded(
    task: TaskPublished, deltas: list[WorkspaceDelta], factory: SandboxFactory
) -> tuple[bool, list[str], str]:
    """(solved, ids that passed, why it could not be graded)."""
    conduct = Conduct(end=SessionCompleted(reason="done", first_offset=0, usage=Usage()), deltas=deltas)
    try:
        result = await grade(task, conduct, factory)
    except GraderCouldNotRun as error:
        return False, [], error.cause
    return result.components["solved"] >= 1.0, result.passed, ""


async def _solution(spec: TaskSpec, task: TaskPublished, factory: SandboxFactory) -> WorkspaceDelta:
    """What the reference solution changes."""
    if SOLVE not in spec.solution:
        changes = [FileChange(path=path, kind="file", content=data) for path, data in spec.solution.items()]
        return WorkspaceDelta(changes=changes)
    sandbox = await factory.open(start_of(task), [], label="task-check")
    try:
        await sandbox.upload({f".solution/{path}": data for path, data in spec.solution.items()})
        place = f"rm -rf /solution && mv .solution /solution && {SHELL} /solution/{SOLVE}"
        result = await sandbox.exec(ExecRequest(shell=place, timeout_s=SOLVE_SECONDS))
        if result.exit_code != 0:
            tail = " ".join((result.stderr or result.stdout)[-200:].split())
            raise GraderCouldNotRun(f"solution/{SOLVE} ended with {result.exit_code}: {tail}", retryable=False)
        return await to_logged(await sandbox.diff(incremental=True), BlobStore(MemoryStore()), "")
    finally:
        await sandbox.destroy()
