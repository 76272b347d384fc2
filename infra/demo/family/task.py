"""`DemoTask`: one generated bug-repair task, with what an agent may see and what only the grader may.

`files` is the whole workspace (modules and `test.py`); `hidden`, `fix` and `functions` never enter it. The hidden
cases are disjoint from the visible ones; at least one of them fails on the buggy source (FAIL_TO_PASS).
"""

from typing import Any

import msgspec

Value = int | bool | str | list[Any]
"""Arguments and results of the family's functions: JSON keeps each exactly, `True` apart from 1 included."""


class Case(msgspec.Struct, frozen=True):
    """One call of the target function: `fails` says whether the buggy source gets it wrong."""

    id: str
    args: list[Value]
    want: Value
    fails: bool


class Edit(msgspec.Struct, frozen=True):
    """Replace `old` (occurs once in the file) by `new`."""

    path: str
    old: str
    new: str


class FunctionSource(msgspec.Struct, frozen=True):
    """A function as it stands in the workspace, bug included; scripted agents draw their guesses from it."""

    path: str
    name: str
    doc: str
    args: list[tuple[str, str]]
    lines: list[str]

    def source(self) -> str:
        head = f'def {self.name}({", ".join(name for name, _ in self.args)}):\n    """{self.doc}"""\n'
        return head + "".join(f"    {line}\n" for line in self.lines)


class VisibleCase(msgspec.Struct, frozen=True):
    """One line of `test.py`."""

    module: str
    function: str
    args: list[Value]
    want: Value


class DemoTask(msgspec.Struct, frozen=True):
    """A task; `id` is `SET-SEED-INDEX` and rebuilds it."""

    id: str
    set: str
    template: str
    instruction: str
    files: dict[str, str]
    target_path: str
    function: str
    visible: list[VisibleCase]
    hidden: list[Case]
    fix: Edit
    functions: list[FunctionSource]

    @property
    def fail_to_pass(self) -> list[str]:
        return [case.id for case in self.hidden if case.fails]

    @property
    def pass_to_pass(self) -> list[str]:
        return [case.id for case in self.hidden if not case.fails]


TEST_SCRIPT = """import importlib

CASES = [
{cases}]
for module, name, args, want in CASES:
    try:
        got = repr(getattr(importlib.import_module(module), name)(*args))
    except Exception as error:
        got = type(error).__name__
    if got != repr(want):
        print(f"test_{{name}}: got {{got}}, want {{want!r}} for {{', '.join(map(repr, args))}}")
        print("1 failed")
        raise SystemExit(1)
print(len({{case[:2] for case in CASES}}), "passed")
"""


def test_script(cases: list[VisibleCase]) -> str:
    """`test.py`: stops at the first failing case; prints the number of functions when all pass."""
    rows = "".join(f'    ("{case.module}", "{case.function}", {case.args!r}, {case.want!r}),\n' for case in cases)
    return TEST_SCRIPT.format(cases=rows)
