"""Why a task cannot be run, whoever published it: one pure rule for the command line and for admission.

A foreign client can write any value that its type allows (attempts of -3, a path above the workspace); what such a task
would do to a queue is settled here, by name, instead of by what happens to fail later.
"""

from __future__ import annotations

import math
import re

from odradek.streams.events.tasks import Budget, HiddenTests, TaskPublished

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+/-]{0,255}")
"""Task ids are shown in terminals, file names of reports and URLs."""

MAX_ATTEMPTS = 1024
"""Attempts of one task. More can never run side by side here; a deployment's own limit is usually far lower."""


def refusal(task: TaskPublished, max_attempts: int = MAX_ATTEMPTS) -> str | None:
    """What is wrong with the task, in one line that starts with the field's name; None for a task that can run."""
    if not ID_PATTERN.fullmatch(task.task_id):
        return "task_id: 1 to 256 of letters, digits and . _ @ : + / -, starting with a letter or digit"
    if not task.instruction.strip():
        return "instruction: is empty"
    if not 1 <= task.attempts <= max_attempts:
        return f"attempts: {task.attempts}, expected 1 to {max_attempts}"
    if task.purpose == "rl" and task.attempts < 2:
        return "attempts: 1, and a group of one has no baseline to learn from; give at least 2, or purpose eval"
    if not _positive(task.deadline_seconds):
        return f"deadline_seconds: {task.deadline_seconds:g}, expected more than 0"
    if not (math.isfinite(task.temperature) and task.temperature >= 0):
        return f"temperature: {task.temperature:g}, expected 0 or more"
    if task.policy_version is not None and task.policy_version < 0:
        return f"policy_version: {task.policy_version}, expected 0 or more"
    if task.files_ref is not None:
        return "files_ref: workspaces by reference are not read yet; publish the files inline"
    return _budget(task.budget) or _workspace(task.files) or _grader(task)


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _budget(budget: Budget) -> str | None:
    for name in ("max_turns", "max_turn_tokens", "max_context_tokens", "wall_seconds", "tool_seconds"):
        value = getattr(budget, name)
        if not _positive(value):
            return f"budget.{name}: {value:g}, expected more than 0"
    return None


def _workspace(files: dict[str, str]) -> str | None:
    """Paths stay inside, and name no two things at once."""
    for path in files:
        parts = path.split("/")
        if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
            return f"files: {path!r} is no relative path of a file"
        if ".git" in parts:
            return f"files: {path!r} is part of a repository's history, where later commits may hold the fix"
        above = next((parent for at in range(1, len(parts)) if (parent := "/".join(parts[:at])) in files), None)
        if above is not None:
            return f"files: {above!r} is a file and, in {path!r}, a folder"
    return None


def _grader(task: TaskPublished) -> str | None:
    if (task.tests is None) == (task.script is None):
        return "tests, script: exactly one of the two grades a task"
    if task.script is not None:
        if not _positive(task.script.timeout_seconds):
            return f"script.timeout_seconds: {task.script.timeout_seconds:g}, expected more than 0"
        escaping = [path for path in task.script.files if any(part in ("", ".", "..") for part in path.split("/"))]
        return f"script.files: {escaping[0]!r} is no relative path of a file" if escaping else None
    assert task.tests is not None
    return hidden_tests_fault(task.tests)


def hidden_tests_fault(tests: HiddenTests) -> str | None:
    """What is wrong with hidden cases: each id once, each listed id a case, at least one that must fail at first."""
    ids = [case.id for case in tests.cases]
    listed = [*tests.fail_to_pass, *tests.pass_to_pass]
    if repeated := sorted({one for one in ids if ids.count(one) > 1}):
        return f"case id {repeated[0]!r} is given twice"
    if twice := sorted({one for one in listed if listed.count(one) > 1}):
        return f"case id {twice[0]!r} is listed twice in FAIL_TO_PASS and PASS_TO_PASS"
    if unknown := sorted(set(listed) - set(ids)):
        return f"FAIL_TO_PASS or PASS_TO_PASS lists {unknown[0]!r}, which is no case"
    if not tests.fail_to_pass:
        return "FAIL_TO_PASS is empty, so the untouched workspace would already be solved"
    return None
