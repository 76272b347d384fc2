"""Hidden tests: only returned values pass. The program runs here in a plain child process, the sandbox's own way in
`tests/contract/test_reward_grading.py`; what the agent's code may try is the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.hidden_tests import STARTED, Verdict, command, equal, judge, plan_of
from odradek.streams.events.tasks import HiddenCase, HiddenTests

MARK = "@5f2c9a "
SOLUTION = "def total(xs):\n    return sum(xs)\n"


def total_tests(module: str = "shop") -> HiddenTests:
    return HiddenTests(
        module=module,
        function="total",
        cases=[
            HiddenCase(id="test_total[two items]", args=[[2, 3]], want=5),
            HiddenCase(id="test_total[no items]", args=[[]], want=0),
        ],
        fail_to_pass=["test_total[two items]"],
        pass_to_pass=["test_total[no items]"],
    )


def one_case(want: Any, *args: Any) -> HiddenTests:
    return HiddenTests(
        module="shop", function="f", cases=[HiddenCase(id="c", args=list(args), want=want)], fail_to_pass=["c"]
    )


def run(
    folder: Path, source: str, tests: HiddenTests | None = None, files: dict[str, str] | None = None, limit: float = 30
) -> Verdict:
    """The verdict on a workspace whose module under test holds `source`."""
    tests = tests or total_tests()
    for path, text in {"shop.py": source, **(files or {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    plan = folder / ".plan"
    plan.write_bytes(plan_of(tests, MARK))
    argv = [sys.executable, *command(str(plan), str(folder))[1:]]
    try:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as late:
        return judge(tests, MARK, (late.stdout or b"").decode(), timed_out=True)
    return judge(tests, MARK, done.stdout, timed_out=False)


def test_a_correct_fix_passes_every_id(tmp_path: Path) -> None:
    verdict = run(tmp_path, SOLUTION)
    assert verdict == Verdict(["test_total[two items]", "test_total[no items]"], [], [])
    assert verdict.solved(total_tests())


# -- whatever the agent's code does, only returned values pass ---------------------------------------------------

IDS = [case.id for case in total_tests().cases]
LOOKS_RIGHT = '["test_total[two items]", "value", 5]'
CHEATS = {
    "ends the process with 0 at import": "import os\nos._exit(0)\n",
    "ends the process with 0 in the call": "import os\ndef total(xs):\n    os._exit(0)\n",
    "raises SystemExit at import": "import sys\nsys.exit(0)\n",
    "raises SystemExit in the call": "import sys\ndef total(xs):\n    sys.exit(0)\n",
    "has a syntax error": "def total(xs)\n    return 5\n",
    "lacks the function": "def other(xs):\n    return 5\n",
    "prints reports without the mark": f"print({LOOKS_RIGHT!r})\ndef total(xs):\n    return 9\n",
    "prints reports with another mark": f"print('@0 ' + {LOOKS_RIGHT!r})\ndef total(xs): ...\n",
    "prints wrong reports with the mark": f"print({MARK!r} + {LOOKS_RIGHT.replace('5', '4')!r})\nraise ValueError\n",
    "prints a pytest summary": "print('===== 2 passed in 0.01s =====')\ndef total(xs):\n    return None\n",
    "closes stdout": "import sys\nsys.stdout.close()\ndef total(xs):\n    return 5\n",
    "closes the descriptor": "import os\nos.close(1)\ndef total(xs):\n    return 5\n",
    "equals everything": "class Yes(int):\n    def __eq__(self, o): return True\ndef total(xs):\n    return Yes(9)\n",
    "returns a text": "def total(xs):\n    return '5'\n",
    "returns itself": "def total(xs):\n    deep = []\n    deep.append(deep)\n    return deep\n",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=CHEATS)
def test_what_returns_no_right_value_fails_every_id_and_is_graded(tmp_path: Path, source: str) -> None:
    """`os._exit(0)` must not pass; none of these is `ungraded` either, for the fault is the session's."""
    verdict = run(tmp_path, source)
    assert (verdict.passed, verdict.failed) == ([], IDS)
    assert not verdict.solved(total_tests())


def test_a_missing_module_fails_and_the_note_says_why(tmp_path: Path) -> None:
    verdict = run(tmp_path, "", total_tests("gone"))
    assert (verdict.passed, verdict.notes) == ([], ["import failed: ModuleNotFoundError"])


def test_an_endless_loop_fails_what_it_did_not_report_and_is_graded(tmp_path: Path) -> None:
    verdict = run(tmp_path, "def total(xs):\n    while not xs:\n        pass\n    return sum(xs)\n", limit=3)
    assert (verdict.passed, verdict.failed) == (IDS[:1], IDS[1:])
    assert verdict.notes == ["timed out"] and not verdict.solved(total_tests())
    assert run(tmp_path, "while True:\n    pass\n", limit=3).failed == IDS


@pytest.mark.parametrize("planted", ["json.py", "sys.py", "importlib/__init__.py", "sitecustomize.py", "encodings.py"])
def test_a_planted_module_neither_passes_nor_stops_the_grader(tmp_path: Path, planted: str) -> None:
    """It must not make a failing session ungraded: that would be a way out of a bad reward."""
    wrong = run(tmp_path, "def total(xs):\n    return 9\n", files={planted: "import os\nos._exit(0)\n"})
    assert wrong.failed == IDS
    assert run(tmp_path, SOLUTION).passed == IDS, "nor does it hurt a right solution that does not use it"


@pytest.mark.parametrize(
    "spoil",
    [
        "import builtins\nbuiltins.print = lambda *a, **k: None\n",
        "import sys\nsys.stdout = open('/dev/null', 'w')\n",
        "import json\njson.dumps = lambda *a, **k: 'spoilt'\n",
        "print('half a line', end='')\n",
        "print('x' * 200_000)\n",
    ],
    ids=["print", "stdout", "json.dumps", "no newline", "much"],
)
def test_a_right_solution_passes_whatever_it_prints_or_replaces(tmp_path: Path, spoil: str) -> None:
    assert run(tmp_path, spoil + SOLUTION).passed == IDS


def test_prints_inside_the_function_do_not_hide_its_reports(tmp_path: Path) -> None:
    noisy = "def total(xs):\n    print('summing', end=' ')\n    return sum(xs)\n"
    assert run(tmp_path, noisy).passed == IDS


def test_knowing_the_mark_does_not_help_without_the_values(tmp_path: Path) -> None:
    """The plan is readable (it is the process's own argument); what is wanted is not in it."""
    spy = (
        "import json, sys\nplan = json.loads(sys.argv[1])\n"
        "for case, args in plan['cases']:\n    print(plan['mark'] + json.dumps([case, 'value', repr(plan)]))\n"
    )
    verdict = run(tmp_path, spy + SOLUTION)
    assert verdict.passed == [], "the first report of an id counts, and it was wrong"
    plan = json.loads(plan_of(total_tests(), MARK))
    assert sorted(plan) == ["cases", "function", "mark", "module", "started"]
    assert plan["cases"] == [[case.id, case.args] for case in total_tests().cases], "arguments and nothing else"


def test_the_function_may_live_in_a_package(tmp_path: Path) -> None:
    assert run(tmp_path, "", total_tests("lib.money"), {"lib/__init__.py": "", "lib/money.py": SOLUTION}).passed == IDS


def test_arguments_changed_by_one_case_do_not_reach_the_next(tmp_path: Path) -> None:
    tests = HiddenTests(
        module="shop",
        function="total",
        cases=[HiddenCase(id="a", args=[[1, 2]], want=3), HiddenCase(id="b", args=[[1, 2]], want=3)],
        fail_to_pass=["a", "b"],
    )
    assert run(tmp_path, "def total(xs):\n    return xs.pop() + xs.pop()\n", tests).passed == ["a", "b"]


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "expression", "passes"),
    [
        (1, "1", True),
        (1, "True", False),
        (True, "1", False),
        (True, "True", True),
        (1, "1.0", False),
        (1.0, "1.0", True),
        (0.1 + 0.2, "0.1 + 0.2", True),
        (0.3, "0.1 + 0.2", False),
        (1.0, "float('nan')", False),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "(1, 2)", False),
        ([1, [True]], "[1, [1]]", False),
        ([], "()", False),
        ([], "[]", True),
        (None, "None", True),
        (None, "0", False),
        ("é\u2028\n", "'é\\u2028\\n'", True),
        ("é", "'e\\u0301'", False),
        ({"a": 1, "b": [2]}, "{'b': [2], 'a': 1}", True),
        ({"a": 1}, "{'a': True}", False),
        ({"a": 1}, "{'a': 1, 'b': 2}", False),
        ({"1": 1}, "{1: 1}", False),
        ([1], "{1}", False),
        (2**70, "2**70", True),
    ],
)
def test_a_value_passes_only_with_its_type(tmp_path: Path, want: Any, expression: str, passes: bool) -> None:
    verdict = run(tmp_path, f"def f():\n    return {expression}\n", one_case(want))
    assert verdict.passed == (["c"] if passes else [])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_every_json_value_equals_itself(value: Any) -> None:
    assert equal(value, value)


@given(json_values, json_values)
def test_equal_is_symmetric_and_never_looser_than_python(a: Any, b: Any) -> None:
    assert equal(a, b) == equal(b, a)
    assert a == b or not equal(a, b)


def test_not_a_number_equals_nothing() -> None:
    assert not equal(math.nan, math.nan)


# -- reports --------------------------------------------------------------------------------------------------------


def test_case_swe_bench_290_ids_with_blanks_are_exact() -> None:
    """SWE-bench/SWE-bench #290, #43: two parameters of one test must not collapse into one."""
    tests = HiddenTests(
        module="m",
        function="q",
        cases=[HiddenCase(id="test_q[a b-1]", args=[], want=1), HiddenCase(id="test_q[a b-2]", args=[], want=2)],
        fail_to_pass=["test_q[a b-2]"],
    )
    output = f'{STARTED}\n{MARK}["test_q[a b-1]", "value", 1]\n{MARK}["test_q[a b-2]", "raised", "KeyError"]\n'
    verdict = judge(tests, MARK, output, False)
    assert (verdict.passed, verdict.failed) == (["test_q[a b-1]"], ["test_q[a b-2]"])
    assert not verdict.solved(tests)


def test_case_agent_lightning_308_a_program_that_never_started_is_ungraded_with_its_cause() -> None:
    """microsoft/agent-lightning #308: a grader that could not start is not a zero."""
    for output in ("", "python3: not found\n", "Killed\n"):
        with pytest.raises(GraderCouldNotRun, match="did not start") as raised:
            judge(total_tests(), MARK, output, timed_out=not output)
        assert raised.value.retryable


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '["test_total[two items]", "value"]',
        '["test_total[two items]", 5, "value"]',
        '{"test_total[two items]": 5}',
        '["test_total[two items]", "raised", 5]',
        '["test_total[two items] ", "value", 5]',
        '["test_total[two", "value", 5]',
        '["test_total[two items]", "value", ' + "[" * 100_000,
    ],
    ids=range(8),
)
def test_a_damaged_report_is_no_report(line: str) -> None:
    verdict = judge(total_tests(), MARK, f"{STARTED}\n{MARK}{line}\n", False)
    assert verdict.failed == IDS


def test_tests_that_name_no_id_solve_nothing() -> None:
    nothing = HiddenTests(module="m", function="f", cases=[], fail_to_pass=[])
    assert not judge(nothing, MARK, f"{STARTED}\n", False).solved(nothing)
