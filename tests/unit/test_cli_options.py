"""Every command of the build: options that do not hide each other, help for each, `--json` everywhere."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import click
import pytest
from support.cli import Cli

from odradek.actors.trainer.step import StepReport
from odradek.infra.cli.context import Number
from odradek.infra.cli.main import COMMANDS, root
from odradek.streams.events.groups import DiscardReason


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and sub-command by its full name."""

    def below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield name, command
        for sub in command.commands.values() if isinstance(command, click.Group) else ():
            yield from below(f"{name} {sub.name}", sub)

    for name in root.list_commands(click.Context(root)):
        yield from below(name, importlib.import_module(f"odradek.infra.cli.{name}").command)


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_no_option_hides_another_and_each_says_what_it_is(name: str) -> None:
    """`--set` twice on one command would silently take the settings' place."""
    command = ALL[name]
    names = Counter(flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts))
    assert {flag: count for flag, count in names.items() if count > 1} == {}
    assert command.help
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert set(silent) <= {"form", "out"}


@pytest.mark.parametrize("name", [name for name, command in ALL.items() if not isinstance(command, click.Group)])
def test_every_command_answers_in_json(name: str) -> None:
    assert "as_json" in {parameter.name for parameter in ALL[name].params}


def test_an_empty_session_id_is_wrong_usage_and_not_the_beginning_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(capsys)
    for command in ("session show", "session resume", "session fork --at 0", "audit resample"):
        for empty in ("", " "):
            done = cli(*command.split(), empty)
            assert done.code == 2 and "is empty: say which one" in done.err


def test_no_command_takes_a_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """Every comparison with NaN is false: it passes click's own ranges, and selects nothing."""
    kinds = {
        type(p.type)
        for command in ALL.values()
        for p in command.params
        if isinstance(p.type, click.types.FloatParamType)
    }
    assert kinds == {Number}
    for value in ("nan", "inf"):
        done = Cli(capsys)("train", "--minutes", value)
        assert done.code == 2 and f"'{value}' is not a finite number" in done.err


def test_the_help_says_what_each_figure_means_that_a_command_prints() -> None:
    """Docstrings are for who reads the code."""
    for name in ("batch explain", "weights explain"):
        told = ALL[name].epilog or ""
        assert [field for field in StepReport.__struct_fields__ if field not in told] == []
    for name in ("report", "demo"):
        told = ALL[name].epilog or ""
        assert [reason for reason in get_args(DiscardReason) if reason not in told] == []


def test_the_table_names_what_the_build_has() -> None:
    assert {"task", "replay", "dlq", "weights", "subject", "eval"} <= {name.split()[0] for name in ALL} <= set(COMMANDS)
