"""In-process stand-ins for the tools that demonstrations use, equal to the real ones in what they print.

Starting `python test.py` in a sandbox for each of a hundred thousand demonstrations would starve the warm start; here
a task's functions run in the bounded subset of `family.evaluate`. Only what demonstrations do is covered: reading,
listing, searching and editing text files in the workspace's root, and `python test.py`. A test compares these outputs
with `actors/tools` on a sample of tasks.
"""

import re

from odradek.actors.tools.edit_file import replace_once
from odradek.actors.tools.errors import ToolError
from odradek.actors.tools.limits import Limits
from odradek.infra.demo.family.evaluate import load_functions, outcome
from odradek.infra.demo.family.task import DemoTask, VisibleCase

TEST_COMMAND = "python test.py"


class EmulatedWorkspace:
    """The files of one task and the tool outputs they give."""

    def __init__(self, task: DemoTask) -> None:
        self.files = dict(task.files)
        self._cases = task.visible

    def call(self, name: str, arguments: dict[str, str]) -> str:
        """The result text of one call."""
        if name == "read_file":
            return self.files.get(arguments["path"], f"error: no such file {arguments['path']}")
        if name == "list_dir":
            return "\n".join(sorted(self.files))
        if name == "grep":
            return self._grep(arguments["pattern"])
        if name == "edit_file":
            return self._edit(arguments["path"], arguments["old"], arguments["new"])
        if name == "run_terminal" and arguments == {"command": TEST_COMMAND}:
            return self._test()
        raise ValueError(f"demonstrations do not use {name} {arguments}")

    @property
    def passing(self) -> bool:
        """Whether the visible tests pass now."""
        return self._first_failure() is None

    def _grep(self, pattern: str) -> str:
        matcher = re.compile(pattern)
        hits = [
            f"{path}:{number}:{line}"
            for path in sorted(self.files)
            for number, line in enumerate(self.files[path].splitlines(), 1)
            if matcher.search(line)
        ]
        return "\n".join(hits) or "no match"

    def _edit(self, path: str, old: str, new: str) -> str:
        if path not in self.files:
            return f"error: no such file {path}"
        try:
            after = replace_once(self.files[path].encode(), old, new, path, Limits().line_chars)
        except ToolError as error:
            return f"error: {error}"
        self.files[path] = after.decode()
        return "ok"

    def _test(self) -> str:
        failure = self._first_failure()
        if failure is None:
            return f"{len({(case.module, case.function) for case in self._cases})} passed"
        case, got = failure
        args = ", ".join(map(repr, case.args))
        return f"test_{case.function}: got {got}, want {case.want!r} for {args}\n1 failed\n[exit 1]"

    def _first_failure(self) -> tuple[VisibleCase, str] | None:
        for case in self._cases:
            got = self._run(case)
            if got != repr(case.want):
                return case, got
        return None

    def _run(self, case: VisibleCase) -> str:
        try:
            function = load_functions(self.files[f"{case.module}.py"])[case.function]
        except (SyntaxError, KeyError) as error:
            return "AttributeError" if isinstance(error, KeyError) else type(error).__name__
        return outcome(function, case.args)[0]
