"""`odradek task check`: the reference solution in real sandboxes, by the real grader."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.cli import Cli

from odradek.actors.tasks.directory import write_task_dir
from odradek.actors.tasks.spec import TaskSpec
from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.publish import as_spec

pytestmark = pytest.mark.contract

FLAKY = b"""
import os
def answer():
    # A name made anew for each run decides: about one run in two.
    return 42 if os.urandom(1)[0] % 2 else 41
"""
GRADER = b"""
cd /workspace
mkdir -p /logs/verifier
if [ "$(python3 -c 'import it; print(it.answer())')" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def demo() -> TaskSpec:
    return as_spec(make_task("train", 12, 0))


def check(cli: Cli, tmp_path: Path, spec: TaskSpec, runs: int) -> tuple[int, dict[str, object]]:
    write_task_dir(spec, tmp_path / spec.name)
    answer = cli("task", "check", tmp_path / spec.name, "--runs", runs, "--json", "--data", tmp_path / "data")
    (result,) = answer.json
    return answer.code, result


def test_a_task_whose_solution_always_passes_is_admitted_with_its_tally(cli: Cli, tmp_path: Path) -> None:
    code, result = check(cli, tmp_path, demo(), 2)
    assert (code, result["verdict"], result["solved"]) == (0, "admitted", 2)
    assert isinstance(result["tests"], dict) and set(result["tests"].values()) == {2}
    assert not list((tmp_path / "data" / "sandboxes").iterdir())


def test_case_swe_smith_26_a_solution_that_passes_only_sometimes_is_quarantined(cli: Cli, tmp_path: Path) -> None:
    """SWE-bench/SWE-smith #26. The chance that 16 fair draws agree is 1 in 32,768."""
    spec = msgspec.structs.replace(
        demo(),
        name="flaky",
        files={"it.py": b"def answer():\n    return 0\n"},
        tests=None,
        test_files={"test.sh": GRADER},
        solution={"it.py": FLAKY},
    )
    code, result = check(cli, tmp_path, spec, 16)
    assert (code, result["verdict"]) == (1, "quarantined")
    assert isinstance(result["solved"], int) and 0 < result["solved"] < 16


def test_a_solve_script_is_run_and_what_it_changes_is_graded(cli: Cli, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(
        demo(),
        name="scripted",
        files={"it.py": b"def answer():\n    return 0\n"},
        tests=None,
        test_files={"test.sh": GRADER},
        solution={"solve.sh": b"sed -i 's/0/42/' it.py\n"},
    )
    code, result = check(cli, tmp_path, spec, 1)
    assert (code, result["verdict"]) == (0, "admitted"), result


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"solution": {}}, "has no solution/"),
        ({"solution": {"unrelated": b""}}, "passed none of 1 runs"),
        ({"solution": {"solve.sh": b"echo no >&2; exit 7\n"}}, "ended with 7: no"),
    ],
)
def test_a_task_without_a_working_solution_is_refused(
    cli: Cli, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    code, result = check(cli, tmp_path, msgspec.structs.replace(demo(), **change), 1)
    assert (code, result["verdict"]) == (1, "refused")
    assert reason in str(result["reason"])


def test_tests_that_the_untouched_workspace_passes_are_refused(cli: Cli, tmp_path: Path) -> None:
    spec = demo()
    solved = msgspec.structs.replace(spec, files={**spec.files, **spec.solution})
    code, result = check(cli, tmp_path, solved, 1)
    assert (code, result["reason"]) == (1, "the untouched workspace already passes")
