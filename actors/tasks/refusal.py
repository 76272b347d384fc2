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

MAX_SECONDS = 7 * 24 * 3600.0
"""Longest deadline, wall clock or command of a task. Less refuses honest long work; a number without a bound is one
that no clock and no 64-bit integer of a decision holds."""

MAX_TOKENS = 100_000_000
"""Most turns, or tokens of a turn or a context. Far above what any engine takes; only bounds what is computed with."""

MAX_NAME = 256
"""Characters of a policy, an image or an idempotency key. Decisions repeat them, and each is one small record."""

MAX_LABEL_CHARACTERS = 16 * 1024
"""Characters of all labels, which `group.opened` repeats. More belongs into the task's own files."""

MAX_PATH_BYTES = 4095
MAX_PATH_PART_BYTES = 255
"""What Linux takes as a path and as one name in it. Longer ones fail in every sandbox of every attempt."""

MAX_DEPTH = 64
"""Nesting of a hidden case's values. Some hundreds can be read and not written again, which stops every reader."""

SHOWN = 80
"""Characters of a foreign value that a reason quotes. More makes the reason as large as the task."""


def refusal(task: TaskPublished, max_attempts: int = MAX_ATTEMPTS) -> str | None:
    """What is wrong with the task, in one line that starts with the field's name; None for a task that can run."""
    if not ID_PATTERN.fullmatch(task.task_id):
        return "task_id: 1 to 256 of letters, digits and . _ @ : + / -, starting with a letter or digit"
    if not task.instruction.strip():
        return "instruction: is empty"
    if not 1 <= task.attempts <= max_attempts:
        return f"attempts: {_number(task.attempts)}, expected 1 to {max_attempts}"
    if task.purpose == "rl" and task.attempts < 2:
        return "attempts: 1, and a group of one has no baseline to learn from; give at least 2, or purpose eval"
    if not _within(task.deadline_seconds, MAX_SECONDS):
        return f"deadline_seconds: {task.deadline_seconds:g}, expected more than 0 and at most {MAX_SECONDS:g}"
    if not (math.isfinite(task.temperature) and task.temperature >= 0):
        return f"temperature: {task.temperature:g}, expected 0 or more"
    if task.policy_version is not None and not 0 <= task.policy_version <= MAX_TOKENS:
        return f"policy_version: {_number(task.policy_version)}, expected 0 or more"
    if task.files_ref is not None:
        return "files_ref: workspaces by reference are not read yet; publish the files inline"
    return _names(task) or _budget(task.budget) or _workspace(task.files) or _grader(task)


def _within(value: float, most: float) -> bool:
    """Integers of any size are compared as they are: as floats they would overflow."""
    return 0 < value <= most


def _names(task: TaskPublished) -> str | None:
    """What decisions about the task repeat stays small, so that no task makes a decision too large to write."""
    for name in ("policy", "image", "idempotency_key"):
        if len(getattr(task, name)) > MAX_NAME:
            return f"{name}: {len(getattr(task, name))} characters, expected at most {MAX_NAME}"
    labels = sum(len(name) + len(value) for name, value in task.labels.items())
    if labels > MAX_LABEL_CHARACTERS:
        return f"labels: {labels} characters together, expected at most {MAX_LABEL_CHARACTERS}"
    return None


def _budget(budget: Budget) -> str | None:
    most = {
        "max_turns": MAX_TOKENS,
        "max_turn_tokens": MAX_TOKENS,
        "max_context_tokens": MAX_TOKENS,
        "wall_seconds": MAX_SECONDS,
        "tool_seconds": MAX_SECONDS,
    }
    for name, limit in most.items():
        value = getattr(budget, name)
        if not _within(value, limit):
            return f"budget.{name}: {_number(value)}, expected more than 0 and at most {limit:.9g}"
    return None


def _number(value: float) -> str:
    """Any number in a few characters."""
    if isinstance(value, int):
        return str(value) if value.bit_length() < 64 else f"an integer of {value.bit_length()} bits"
    return f"{value:g}"


def _quoted(value: str) -> str:
    """A foreign value in a reason: its beginning."""
    return repr(value if len(value) <= SHOWN else f"{value[:SHOWN]}…")


def _workspace(files: dict[str, str]) -> str | None:
    """Paths stay inside, and name no two things at once."""
    for path in files:
        parts = path.split("/")
        if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
            return f"files: {_quoted(path)} is no relative path of a file"
        if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_PATH_PART_BYTES for part in parts):
            return (
                f"files: {_quoted(path)} is longer than a path can be: at most {MAX_PATH_BYTES} bytes, and "
                f"{MAX_PATH_PART_BYTES} a name"
            )
        if ".git" in parts:
            return f"files: {_quoted(path)} is part of a repository's history, where later commits may hold the fix"
        above = next((parent for at in range(1, len(parts)) if (parent := "/".join(parts[:at])) in files), None)
        if above is not None:
            return f"files: {_quoted(above)} is a file and, in {_quoted(path)}, a folder"
    return None


def _grader(task: TaskPublished) -> str | None:
    if (task.tests is None) == (task.script is None):
        return "tests, script: exactly one of the two grades a task"
    if task.script is not None:
        if not _within(task.script.timeout_seconds, MAX_SECONDS):
            return (
                f"script.timeout_seconds: {task.script.timeout_seconds:g}, expected more than 0 and at most "
                f"{MAX_SECONDS:g}"
            )
        escaping = [path for path in task.script.files if any(part in ("", ".", "..") for part in path.split("/"))]
        return f"script.files: {_quoted(escaping[0])} is no relative path of a file" if escaping else None
    assert task.tests is not None
    return hidden_tests_fault(task.tests)


def hidden_tests_fault(tests: HiddenTests) -> str | None:
    """What is wrong with hidden cases: each id once, each listed id a case, at least one that must fail at first."""
    ids = [case.id for case in tests.cases]
    listed = [*tests.fail_to_pass, *tests.pass_to_pass]
    if repeated := sorted({one for one in ids if ids.count(one) > 1}):
        return f"case id {_quoted(repeated[0])} is given twice"
    if twice := sorted({one for one in listed if listed.count(one) > 1}):
        return f"case id {_quoted(twice[0])} is listed twice in FAIL_TO_PASS and PASS_TO_PASS"
    if unknown := sorted(set(listed) - set(ids)):
        return f"FAIL_TO_PASS or PASS_TO_PASS lists {_quoted(unknown[0])}, which is no case"
    if deep := next((case.id for case in tests.cases if _deeper([case.args, case.want], MAX_DEPTH)), None):
        return f"case id {_quoted(deep)} nests its values deeper than {MAX_DEPTH}"
    if not tests.fail_to_pass:
        return "FAIL_TO_PASS is empty, so the untouched workspace would already be solved"
    return None


def _deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts nest deeper than `levels`; level by level, so that depth costs no stack."""
    layer: list[object] = [value]
    for _ in range(levels + 1):
        layer = [inner for outer in layer for inner in _inside(outer)]
    return bool(layer)


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []
