"""Hidden tests of one function: the agent's code computes, a parent outside the sandbox compares.

What the agent's code ever holds: the arguments of the cases. What it never holds: the wanted values and the verdict.
So it can print, exit, plant modules or files as it likes; the only way to pass is to return the right values. Every
case must report: a process that ends early, exit code 0 included, passes nothing that it did not report.

The arguments travel as a file, because a process takes no argument of their size; so a task's cases are bounded by
what an event holds and by nothing here.

Pure: `plan_of` and `command` make what runs inside (`inside.py`), `judge` reads what it wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.streams.events.tasks import HiddenTests

STARTED = "grader-started"
"""First line of the program, before any of the agent's code is imported: without it, the grader could not run."""

_PROGRAM = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Exact test ids by outcome; together they are all of the task's ids."""

    passed: list[str]
    failed: list[str]
    notes: list[str]

    def solved(self, tests: HiddenTests) -> bool:
        """Every FAIL_TO_PASS and PASS_TO_PASS id passed."""
        wanted = {*tests.fail_to_pass, *tests.pass_to_pass}
        return bool(wanted) and wanted <= set(self.passed)


def plan_of(tests: HiddenTests, mark: str) -> bytes:
    """What the program is told. `mark`: a fresh random word that starts each report line."""
    plan = {
        "module": tests.module,
        "function": tests.function,
        "mark": mark,
        "started": STARTED,
        "cases": [[case.id, case.args] for case in tests.cases],
    }
    return json.dumps(plan).encode()


def command(plan: str, workspace: str) -> list[str]:
    """The argv to run inside the sandbox: the paths there of the plan and of the workspace."""
    return ["python3", "-I", "-S", "-B", "-c", _PROGRAM, plan, workspace]


def report_bytes(tests: HiddenTests, mark: str) -> int:
    """Bytes that the program writes of right answers alone."""
    return sum(len(json.dumps([case.id, "value", case.want])) + len(mark) + 2 for case in tests.cases)


def judge(tests: HiddenTests, mark: str, output: str, timed_out: bool) -> Verdict:
    """Compare what was reported with what is wanted.

    Raises GraderCouldNotRun if the program never started. The first report of an id counts.
    """
    lines = output.splitlines()
    if STARTED not in lines:
        raise GraderCouldNotRun(f"the grading process did not start: {output[-200:]!r}")
    reports: dict[str, tuple[str, Any]] = {}
    notes: list[str] = ["timed out"] if timed_out else []
    for line in lines:
        report = _report(line, mark)
        if report is None:
            continue
        case, kind, value = report
        if kind == "import":
            notes.append(f"import failed: {value}")
        reports.setdefault(case, (kind, value))
    passed = [case.id for case in tests.cases if _same(reports.get(case.id), case.want)]
    done = set(passed)
    return Verdict(passed, [case.id for case in tests.cases if case.id not in done], notes)


def _report(line: str, mark: str) -> tuple[str, str, Any] | None:
    if not line.startswith(mark):
        return None
    try:
        parsed = json.loads(line[len(mark) :])
    except (ValueError, RecursionError):
        return None
    match parsed:
        case [str() as case, str() as kind, value]:
            return case, kind, value
    return None


def _same(report: tuple[str, Any] | None, want: Any) -> bool:
    return report is not None and report[0] == "value" and equal(report[1], want)


def equal(got: Any, want: Any) -> bool:
    """Equal in value and type, all the way down: True is not 1, 1.0 is not 1. Not a number equals nothing."""
    if type(got) is not type(want):
        return False
    if isinstance(want, list):
        return len(got) == len(want) and all(equal(g, w) for g, w in zip(got, want, strict=True))
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(equal(got[key], value) for key, value in want.items())
    return bool(got == want)
