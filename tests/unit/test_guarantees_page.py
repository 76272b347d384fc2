"""The page that lists which tests carry which guarantee says what is: modules, checks and tests by their names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from support.crash.checks import CHECKS, GUARANTEES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "GUARANTEES.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", PAGE, flags=re.MULTILINE))
NUMBERED = {int(title.partition(".")[0]): title for title in SECTIONS if title[0].isdigit()}
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_all_twelve_are_there_in_order() -> None:
    assert list(NUMBERED) == list(range(1, 13))


@pytest.mark.parametrize(("file", "name"), TESTS, ids=[name for _, name in TESTS])
def test_a_named_test_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in names, f"{file} has no {name}"


@pytest.mark.parametrize("number", sorted(NUMBERED))
def test_the_docstring_that_states_a_guarantee_names_its_tests(number: int) -> None:
    section = SECTIONS[NUMBERED[number]]
    stated = re.findall(r"^- Stated in: (.*)$", section, flags=re.MULTILINE)
    modules = re.findall(r"`([\w/]+\.py)`", stated[0])
    listed = {Path(file).name for file, _ in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)}
    for module in modules:
        told = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
        says = re.search(
            rf"Guarantee {number} \(tests/GUARANTEES\.md\): ((?:test_\w+\.py(?:, )?)+)", " ".join(told.split())
        )
        assert says is not None, f"{module} does not say which tests carry guarantee {number}"
        named = set(re.findall(r"test_\w+\.py", says.group(1)))
        assert named and named <= listed, f"{module} names {named}, the page lists {listed}"


def test_every_check_of_the_harness_is_under_its_guarantee() -> None:
    for name, number in GUARANTEES.items():
        title = NUMBERED[number] if number else "Nothing is left"
        told = re.search(r"^- Under fire: ((?:.|\n  )*)$", SECTIONS[title], flags=re.MULTILINE)
        listed = set(re.findall(r"`(\w+)`", told.group(1))) if told else set()
        assert listed == {check.__name__ for guarantee, check in CHECKS if guarantee == name}, title
