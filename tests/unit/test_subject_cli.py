"""`odradek subject erase` before it destroys anything: it asks, and says in one line why it can't."""

from __future__ import annotations

import sys

import pytest
from support.cli import Cli, Terminal

from odradek.streams.config import KafkaConfig


@pytest.fixture
def nowhere(capsys: pytest.CaptureFixture[str]) -> Cli:
    """A broker that nothing reaches: what asks it for anything fails with exit code 3."""
    return Cli(capsys, KafkaConfig(bootstrap="127.0.0.1:9", prefix="t"))


@pytest.mark.parametrize("answer", ["n\n", "\n"])
def test_nothing_is_erased_unless_the_person_says_yes(
    nowhere: Cli, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    done = nowhere("subject", "erase", "ann")
    assert (done.code, done.out.strip()) == (1, "")
    assert "Destroy the key of ann for ever?" in done.err
    assert done.err.endswith("odradek: nothing was erased of ann\n")


@pytest.mark.parametrize(("terminal", "options"), [(False, []), (True, ["--json"])])
def test_without_anybody_to_ask_yes_has_to_be_said(
    nowhere: Cli, monkeypatch: pytest.MonkeyPatch, terminal: bool, options: list[str]
) -> None:
    if terminal:
        monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    done = nowhere("subject", "erase", "ann", *options)
    assert done.code == 2 and "there is no terminal to ask on: say --yes" in done.out + done.err


def test_a_stopped_deployment_is_one_line_and_nothing_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    for options in ([], ["--yes"]):
        done = Cli(capsys)("subject", "erase", "ann", *options)
        (line,) = done.err.splitlines()
        assert done.code == 3 and line.startswith("odradek: kafka is not running for ")
