"""Why a task cannot be run, whoever published it: one pure rule for the command line and for admission.

A foreign client can write any value that its type allows (attempts of -3, a path above the workspace); what such a task
would do to a queue is settled here, by name, instead of by what happens to fail later.
"""

from __future__ import annotations

import math
import re

from odradek.actors.tasks.paths import paths_fault, quoted
from odradek.sandbox_images.recipe import shipped
from odradek.streams.events.tasks import Budget, HiddenScript, HiddenTests, TaskPublished
from odradek.streams.privacy.names import SHARED

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

MAX_COMMAND_BYTES = 128 * 1024 - 1
"""Bytes of one command: what Linux takes as one argument of a process."""

MAX_SETUP_BYTES = 512 * 1024
"""Bytes of all set-up commands, which each session's first event repeats."""

MAX_TREE_BYTES = 200 * 1024 * 1024
"""Bytes of one tree of a task. A larger one is a mistake (a checkout with its build outputs) more often than a task."""

MAX_GRADING_SECONDS = 150.0
"""Seconds that a task's own verifier gets at most, whatever the task says: the rest of a grading's deadline is for
making the sandbox. Too low: honest test suites never give a reward. Too high: a stuck one holds up the others."""

DIGEST = re.compile(r"[0-9a-f]{64}")

MAX_DEPTH = 64
"""Nesting of a hidden case's values. Some hundreds can be read and not written again, which stops every reader."""


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
    return (
        _names(task) or _budget(task.budget) or _image(task.image) or _setup(task.setup) or _tree(task) or _grader(task)
    )


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


def _image(image: str) -> str | None:
    if image in shipped() or DIGEST.fullmatch(image):
        return None
    return f"image: {quoted(image)} is neither a shipped image ({', '.join(sorted(shipped()))}) nor an image's digest"


def _setup(commands: list[str]) -> str | None:
    for at, command in enumerate(commands):
        if fault := _command(command):
            return f"setup: command {at} {fault}"
    size = sum(len(command.encode()) for command in commands)
    return f"setup: {size} bytes together, expected at most {MAX_SETUP_BYTES}" if size > MAX_SETUP_BYTES else None


def _command(command: str) -> str | None:
    if not command.strip():
        return "is empty"
    if "\0" in command:
        return "has a null character"
    size = len(command.encode())
    return f"has {size} bytes, and a command can have {MAX_COMMAND_BYTES}" if size > MAX_COMMAND_BYTES else None


def _tree(task: TaskPublished) -> str | None:
    """The workspace: inline, or a tar that is nobody's, so that no task can name another person's object."""
    ref = task.files_ref
    if ref is not None:
        if task.files:
            return "files, files_ref: a workspace has one of the two"
        if not DIGEST.fullmatch(ref.sha256) or ref.subject or ref.key != f"blobs/{SHARED}/{ref.sha256}":
            return f"files_ref: {quoted(ref.key)} is not blobs/{SHARED}/SHA256 of a tar"
        if not 0 < ref.size <= MAX_TREE_BYTES:
            return f"files_ref: {_number(ref.size)} bytes, expected 1 to {MAX_TREE_BYTES}"
    fault = paths_fault(task.files)
    return f"files: {fault}" if fault else None


def _grader(task: TaskPublished) -> str | None:
    if (task.tests is None) == (task.script is None):
        return "tests, script: exactly one of the two grades a task"
    if task.script is not None:
        return _script(task.script)
    assert task.tests is not None
    return hidden_tests_fault(task.tests)


def _script(script: HiddenScript) -> str | None:
    if not _within(script.timeout_seconds, MAX_SECONDS):
        return f"script.timeout_seconds: {script.timeout_seconds:g}, expected more than 0 and at most {MAX_SECONDS:g}"
    if fault := _command(script.command):
        return f"script.command: {fault}"
    if script.command == HiddenScript(files={}).command and "test.sh" not in script.files:
        return "script.files: has no test.sh, which script.command runs"
    fault = paths_fault(script.files)
    return f"script.files: {fault}" if fault else None


def hidden_tests_fault(tests: HiddenTests) -> str | None:
    """What is wrong with hidden cases: each id once, each listed id a case, at least one that must fail at first."""
    if not all(part.isidentifier() for part in tests.module.split(".")):
        return f"module {quoted(tests.module)} is no name that Python imports"
    if not tests.function.isidentifier():
        return f"function {quoted(tests.function)} is no name of a function"
    ids = [case.id for case in tests.cases]
    listed = [*tests.fail_to_pass, *tests.pass_to_pass]
    if repeated := sorted({one for one in ids if ids.count(one) > 1}):
        return f"case id {quoted(repeated[0])} is given twice"
    if twice := sorted({one for one in listed if listed.count(one) > 1}):
        return f"case id {quoted(twice[0])} is listed twice in FAIL_TO_PASS and PASS_TO_PASS"
    if unknown := sorted(set(listed) - set(ids)):
        return f"FAIL_TO_PASS or PASS_TO_PASS lists {quoted(unknown[0])}, which is no case"
    if deep := next((case.id for case in tests.cases if _deeper([case.args, case.want], MAX_DEPTH)), None):
        return f"case id {quoted(deep)} nests its values deeper than {MAX_DEPTH}"
    for case in tests.cases:
        if (odd := _not_json([case.args, case.want])) is not None:
            return f"case id {quoted(case.id)} holds {odd}, which no JSON value is"
    if not tests.fail_to_pass:
        return "FAIL_TO_PASS is empty, so the untouched workspace would already be solved"
    return None


def _deeper(value: object, levels: int) -> bool:
    """Whether lists and dicts nest deeper than `levels`; level by level, so that depth costs no stack."""
    layer: list[object] = [value]
    for _ in range(levels + 1):
        layer = [inner for outer in layer for inner in _inside(outer)]
    return bool(layer)


def _not_json(value: object) -> str | None:
    """What in a value is not plain JSON, in a few words: it could neither reach the function nor be compared."""
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            return "an object with keys that are not text"
        value = list(value.values())
    if isinstance(value, list):
        return next((odd for inner in value if (odd := _not_json(inner)) is not None), None)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value}"
    if isinstance(value, int):
        return None if value.bit_length() < 64 else f"an integer of {value.bit_length()} bits (63 fit)"
    return None if value is None or isinstance(value, str) else f"a {type(value).__name__}"


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []
