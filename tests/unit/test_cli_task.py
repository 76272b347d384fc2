"""`odradek task`: what is refused without any service, and how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cli import Cli

from odradek.infra.cli.task_check import TaskCheck


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish",),
        ("publish", "missing"),
        ("publish", "x", "--attempts", "0"),
        ("publish", "x", "--deadline", "0"),
        ("publish", "x", "--purpose", "both"),
        ("publish", "x", "--atempts", "3"),
        ("publish", "x", "--set", "kafka.bootstap=a:1"),
        ("check", "missing"),
        ("cancel",),
        ("unknown",),
    ],
)
def test_wrong_usage_is_exit_code_2_and_one_line(cli: Cli, arguments: tuple[str, ...]) -> None:
    answer = cli("task", *arguments)
    assert answer.code == 2
    assert answer.out == "" and len(answer.err.splitlines()) == 1


def test_with_json_the_error_is_one_document(cli: Cli, tmp_path: Path) -> None:
    answer = cli("task", "publish", tmp_path, "--json")
    assert answer.code == 2 and answer.err == ""
    assert json.loads(answer.out)["error"].startswith(f"{tmp_path}: has neither task.toml")


def test_an_unreachable_broker_is_one_line_and_exit_code_3(cli: Cli, tmp_path: Path) -> None:
    body = {"task_id": "a", "instruction": "b", "script": {"files": {"test.sh": ""}}}
    (tmp_path / "task.json").write_text(json.dumps(body))
    unreachable = ("--set", "kafka.bootstrap=127.0.0.1:1", "--set", "kafka.connect_timeout_s=1")
    answer = cli("task", "publish", tmp_path / "task.json", *unreachable)
    assert answer.code == 3 and answer.out == ""
    assert "no Kafka broker answers at 127.0.0.1:1" in answer.err.splitlines()[-1]
    nothing = cli("task", "publish", tmp_path / "task.json", "--data", tmp_path / "nothing")
    assert nothing.code == 3 and "run odradek up" in nothing.err.splitlines()[-1]


def test_a_flaky_task_shows_its_rarest_test_first() -> None:
    check = TaskCheck(
        task_id="t",
        verdict="quarantined",
        reason="flaky: the solution passed 3 of 5 runs",
        runs=5,
        solved=3,
        tests={"test_a": 5, "test_b": 3},
        causes={"timed out": 1},
    )
    assert check.text().splitlines() == [
        "quarantined  t: flaky: the solution passed 3 of 5 runs",
        "    3/5  test_b",
        "    5/5  test_a",
        "    1/5 could not be graded: timed out",
    ]
