"""read_lints: plain errors, found without running anything."""

from pathlib import Path

import pytest
from support.local_workspace import LocalWorkspace

from odradek.actors.tools.limits import Limits
from odradek.actors.tools.python_lint import lint
from odradek.actors.tools.registry import run_call


async def lints(root: Path, **arguments: str) -> str:
    return (await run_call(LocalWorkspace(root), "read_lints", arguments, Limits())).text


@pytest.mark.parametrize(
    ("source", "findings"),
    [
        ("def f(:\n    pass\n", [(1, "syntax error: invalid syntax")]),
        ("x = 1\n  y = 2\n", [(2, "syntax error: unexpected indent")]),
        ("return 1\n", [(1, "syntax error: 'return' outside function")]),
        ("def f(a):\n    return b\n", [(2, "undefined name 'b'")]),
        ("import os\nimport re as r\nprint(r)\n", [(1, "'os' imported but unused")]),
        ("if x is 1:\n    pass\nx = 1\n", [(1, '"is" with a literal. Did you mean "=="?')]),
        ("import os\n__all__ = ['os']\n", []),
        ("from m import *\nprint(anything)\n", []),
        ("def f():\n    global g\n    g = 1\nprint(g, __file__, len)\n", []),
        ("class A:\n    x = 1\n    y = x\n    def m(self):\n        return __class__\n", []),
        ("class A:\n    x = 1\n    y = [x for _ in 'ab']\n", [(3, "undefined name 'x'")]),
        ("try:\n    unicode\nexcept NameError:\n    unicode = str\n", []),
        ("print([i for i in range(3)], (lambda q: q)(1))\n", []),
        ("import a.b\na.b.c()\n", []),
        ("# -*- coding: latin-1 -*-\nx = '\xe9'\n", []),
        ("", []),
    ],
)
def test_what_is_found_and_what_is_not(source: str, findings: list[tuple[int, str]]) -> None:
    assert [f for f in lint(source.encode("latin-1"), is_package=False) if f not in findings] == []
    assert [f for f in findings if f not in lint(source.encode("latin-1"), is_package=False)] == []


def test_imports_of_a_package_file_are_its_exports() -> None:
    assert lint(b"from .a import b\n", is_package=True) == []


async def test_findings_are_listed_by_path_and_line(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("import os\n\nprint(x)\n")
    (tmp_path / "b.py").write_text("def f(:\n")
    (tmp_path / "notes.md").write_text("def f(:\n")
    assert await lints(tmp_path) == (
        "b.py:1: syntax error: invalid syntax\npkg/a.py:1: 'os' imported but unused\npkg/a.py:3: undefined name 'x'"
    )
    assert await lints(tmp_path, path="pkg/a.py") == (
        "pkg/a.py:1: 'os' imported but unused\npkg/a.py:3: undefined name 'x'"
    )
    assert await lints(tmp_path, path="notes.md") == "error: notes.md is not a Python file; only Python is checked"
    (tmp_path / "b.py").write_text("x = 1\n")
    assert await lints(tmp_path, path="b.py") == "no findings"


@pytest.mark.parametrize(
    "source",
    [b"x = 1\0", b"(" * 5000, b"-" * 200_000 + b"1", b"\xff\xfe", b"f(" * 90 + b")" * 90, b"lambda: " * 50_000 + b"1"],
    ids=["NUL", "parentheses", "minus", "encoding", "calls", "lambdas"],
)
async def test_hostile_source_is_answered_and_the_next_file_is_still_checked(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "a.py").write_bytes(source)
    (tmp_path / "b.py").write_text("print(x)\n")
    answer = await lints(tmp_path)
    assert answer.endswith("b.py:1: undefined name 'x'")


async def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert await lints(tmp_path) == "no findings"
    assert not (tmp_path / "ran").exists()
