"""The command line of serving a person, without any service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from odradek.infra.demo.sample import write_sample
from odradek.infra.errors import UsageError
from odradek.infra.serve.request import message_of
from odradek.infra.serve.select import select
from odradek.infra.serve.snapshot import take


def _cli(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odradek.infra.cli.main", "run", *arguments, "--data", str(tmp_path / "data")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def test_without_a_deployment_one_line_names_the_command(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_sample(project)
    done = _cli(tmp_path, str(project), "fix it", "--yes")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"odradek: kafka is not running for {tmp_path / 'data'}: run odradek up\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["."], "Missing argument 'REQUEST': what should the agent do?"),
        ([".", "  ", "--yes"], "Missing argument 'REQUEST': what should the agent do?"),
        ([".", "fix it", "--yes", "--subject", " "], "a subject has a name"),
        ([".", "fix it"], "there is no terminal to ask on: say --yes or --no"),
        ([".", "fix it", "--json"], "there is no terminal to ask on: say --yes or --no"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_read(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = _cli(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stdout + done.stderr


def test_the_sample_project_says_what_it_is_and_fails_its_test(tmp_path: Path) -> None:
    folder = tmp_path / "sample"
    done = _cli(tmp_path, str(folder), "--sample", "--json")
    assert done.returncode == 0
    request = json.loads(done.stdout)["request"]
    assert "generated project" in (folder / "README.md").read_text()
    assert request in (folder / "README.md").read_text()
    test = subprocess.run([sys.executable, "-B", "test.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert test.returncode == 1
    assert request.removeprefix("fix ") in test.stdout
    tree = take(folder, select(folder)).tree
    first, _, modules = message_of(request, tree).partition("\n")
    assert (first, set(modules.split())) == (request, {p for p in tree if p.endswith(".py")} - {"test.py"})


def test_the_sample_is_never_written_over_anything(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        write_sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
