"""The command line: fast to start, one clear line for every failure, documented exit codes, JSON everywhere."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.waiting import eventually_blocking

from odradek.infra.cli import log
from odradek.infra.cli import main as cli
from odradek.infra.cli.context import CaseFailed, Context, report_failure
from odradek.infra.config.load import load
from odradek.infra.errors import InfraError, StackError
from odradek.infra.stack.state import ACTORS_LOCK, locked, under_way
from odradek.streams.errors import StreamError


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "odradek.infra.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_help_lists_what_this_build_has_and_the_exit_codes() -> None:
    """A planned command without a module is not promised."""
    done = _run("--help")
    assert done.returncode == 0
    listed = {line.split()[0] for line in done.stdout.partition("Commands:")[2].splitlines() if line.startswith("  ")}
    here = Path(cli.__file__).parent
    for name in cli.COMMANDS:
        assert (name in listed) == (here / f"{name}.py").exists(), name
    assert "Exit codes: 0 done; 1 a case failed" in done.stdout


def test_without_arguments_it_prints_help() -> None:
    """The first thing that a newcomer types."""
    assert _run().stdout.startswith("Usage: odradek")


def test_starting_the_command_line_imports_neither_torch_nor_ray() -> None:
    """They cost seconds and hundreds of megabytes, for `--help` too."""
    script = (
        "import sys; from odradek.infra.cli.main import run; run(['config', 'show', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'boto3', 'aiokafka')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_looking_at_a_policy_directory_imports_neither_ray_nor_torch() -> None:
    """Most of what `policy show` took on a busy machine was the import of Ray, which it does not use."""
    script = (
        "import sys, odradek.infra.cluster.policy; "
        "sys.exit(', '.join(name for name in ('torch', 'ray', 'transformers') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("policy show {}", "reading {} …"), ("restore --dry-run", "looking whether the actors run …")],
)
def test_a_slow_command_says_what_it_does_before_its_first_wait(tmp_path: Path, arguments: str, said: str) -> None:
    """Nothing on the screen looks as if it hung."""
    none = str(tmp_path / "none")
    done = _run(*arguments.format(none).split(), "--data", none)
    first, *_, last = done.stderr.splitlines()
    assert first.endswith(f"s] {said.format(none)}") and last.startswith("odradek: ")


def test_dashboard_says_that_mlflow_is_missing_before_it_asks_for_a_broker(tmp_path: Path) -> None:
    """Else a person starts the services, only to learn that the installation can't work here."""
    none, folder = str(tmp_path / "none"), str(tmp_path / "mlflow")
    done = _run("dashboard", "--data", none, "--environment", folder)
    first, last = done.stderr.splitlines()
    assert f"MLflow is not in {folder} yet" in first and last.startswith("odradek: kafka is not running")
    quiet = _run("dashboard", "--data", none, "--otlp", "http://127.0.0.1:9")
    assert quiet.stderr.startswith("odradek: kafka is not running"), "a collector needs no MLflow"
    assert done.returncode == quiet.returncode == 3
    assert not list(tmp_path.iterdir()), "nothing was installed"


def test_a_command_on_the_log_says_what_it_does_while_an_import_holds_up_its_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first import of the object store's client does for half a minute on a busy machine."""
    monkeypatch.setattr(log, "SAY_AFTER_S", 0.01)
    said: list[str] = []
    context = Context(load(data=tmp_path), as_json=False)
    monkeypatch.setattr(context, "say", said.append)

    async def work(_tell: log.Say) -> str:
        eventually_blocking(lambda: said, "the first line of progress")
        return "done"

    assert log.run(context, "reading the log", work) == "done"
    assert said[0] == "reading the log …"


def _leaves(command: click.Command) -> list[click.Command]:
    """The commands of a group, and of the groups in it."""
    if not isinstance(command, click.Group):
        return [command]
    return [leaf for part in command.commands.values() for leaf in _leaves(part)]


def test_every_listed_command_loads_and_takes_json() -> None:
    """A command that can't be imported, or that only speaks to people, is found here."""
    context = click.Context(cli.root)
    for name in cli.root.list_commands(context):
        command = cli.root.get_command(context, name)
        assert command is not None
        for leaf in _leaves(command):
            assert "--json" in {option for parameter in leaf.params for option in parameter.opts}, leaf.name
            assert leaf.help, leaf.name


def test_a_wrong_setting_is_exit_code_2_and_one_line() -> None:
    """Usage errors are told before anything starts."""
    done = _run("status", "--set", "kafka.boot-strap=x")
    assert done.returncode == 2
    expected = "odradek: --set kafka.boot-strap: there is no key 'boot-strap' in [kafka]; did you mean 'bootstrap'?\n"
    assert done.stderr == expected
    assert done.stdout == ""


def test_an_unknown_command_is_exit_code_2() -> None:
    """And says so in one line."""
    done = _run("staus")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_errors_are_json_when_json_was_asked_for() -> None:
    """A program reads standard output only."""
    done = _run("status", "--json", "--set", "nonsense")
    assert json.loads(done.stdout)["exit_code"] == 2
    assert done.returncode == 2
    assert done.stderr == ""


def test_config_show_prints_origin_and_masks_secrets() -> None:
    """What a person pastes into an issue."""
    done = _run("config", "show", ODRADEK_KAFKA__SASL_PASSWORD="hunter2", ODRADEK_DEMO__SEED="7")
    lines = {line.split()[0]: line.split(maxsplit=2) for line in done.stdout.splitlines()}
    assert lines["demo.seed"][1:] == ["7", "environment ODRADEK_DEMO__SEED"]
    assert lines["kafka.sasl_password"][1] == "•••"
    assert lines["lane.attempts"][1:] == ["8", "default"]
    assert "hunter2" not in done.stdout + done.stderr


def test_config_show_is_json_on_request() -> None:
    """The same values, for programs."""
    shown = {item["key"]: item for item in json.loads(_run("config", "show", "--json").stdout)}
    assert shown["lane.attempts"]["value"] == 8
    assert shown["lane.attempts"]["meaning"].startswith("Sessions of one group, ")


def test_status_of_nothing_is_exit_code_3_and_creates_nothing(tmp_path: Path) -> None:
    """Asking must not make folders."""
    done = _run("status", "--json", "--data", str(tmp_path / "none"))
    assert done.returncode == 3
    assert {item["name"]: item["health"] for item in json.loads(done.stdout)["services"]} == {
        "kafka": "stopped",
        "s3": "stopped",
        "ray": "stopped",
    }
    assert json.loads(done.stdout)["waiting"] == []
    assert not (tmp_path / "none").exists()


def _stdout_to(kind: str) -> int:
    """A standard output that takes nothing: `closed` is closed by the shell."""
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("kind", ["closed", "full", "broken"])
@pytest.mark.parametrize("arguments", ["config show", "status --json", "status --json --set nonsense", "down"])
def test_an_answer_that_nobody_can_read_is_one_line_and_an_exit_code(tmp_path: Path, kind: str, arguments: str) -> None:
    """A closed pipe or a full disk must not look like a success, nor like a bug of ours."""
    line = f"{sys.executable} -m odradek.infra.cli.main {arguments} --data {tmp_path}/none"
    command = ["sh", "-c", f"{line} >&-" if kind == "closed" else line]
    out = _stdout_to(kind)
    try:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(out)
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    if "nonsense" in arguments:
        assert (done.returncode, said.startswith("odradek: --set nonsense")) == (2, True), "the first fault is told"
    else:
        assert (done.returncode, said.startswith("odradek: standard output took no answer (")) == (3, True)


def test_progress_with_standard_error_closed_does_not_join_the_answer(tmp_path: Path) -> None:
    """Python prints to standard output where it has no standard error."""
    line = f"{sys.executable} -m odradek.infra.cli.main status --json --data {tmp_path}/none 2>&-"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)["waiting"]) == (3, [])


def test_status_while_an_up_starts_the_actors_says_so_and_asks_none(tmp_path: Path) -> None:
    """They are not there yet: to ask would take as long as Ray takes to say so."""
    with locked(tmp_path, name=ACTORS_LOCK):
        done = _run("status", "--json", "--data", str(tmp_path))
    assert done.returncode == 3
    last = json.loads(done.stdout)["services"][-1]
    assert (last["name"], last["health"]) == ("actors", "starting")
    assert not under_way(tmp_path, ACTORS_LOCK), "whoever held it is gone"


def test_down_of_nothing_is_fine(tmp_path: Path) -> None:
    """`down` is safe to repeat."""
    done = _run("down", "--data", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (0, "nothing was running\n")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StackError("broken\n  in two lines"), 3),
        (StreamError("broken in two lines"), 3),
        (CaseFailed("broken in two lines"), 1),
        (click.UsageError("broken in two lines"), 2),
    ],
)
def test_expected_errors_are_one_line(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever room raised them."""
    assert report_failure(error, as_json=False) == code
    assert capsys.readouterr().err == "odradek: broken in two lines\n"


def test_an_interrupt_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    """As shells expect."""
    assert report_failure(KeyboardInterrupt(), as_json=False) == 130
    assert capsys.readouterr().err == "odradek: interrupted\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/d/lock"),
            "/d/lock: Read-only file system: this user may not",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/d/x"), "/d/x: Permission denied: this user may not"),
        (OSError(errno.ENOSPC, "No space left on device", "/d/x"), "/d/x: No space left on device: make room there"),
        (OSError(errno.ENOSPC, "No space left on device"), "where this command writes: No space left on device: make"),
    ],
)
def test_a_place_that_takes_nothing_is_named_with_what_to_do(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(error, as_json=False) == 3
    told = capsys.readouterr().err
    assert told.startswith(f"odradek: {said}") and told.count("\n") == 1 and "unexpected" not in told


def test_a_refusal_that_names_no_place_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mount or a signal that the kernel refuses: whoever reads it needs the details."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert report_failure(PermissionError(errno.EPERM, "Operation not permitted"), as_json=False) == 3
    assert "unexpected PermissionError" in capsys.readouterr().err


def test_an_unexpected_error_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person sees one line; the traceback is in a file that only they can read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        assert report_failure(error, as_json=False) == 3
    (detail,) = (tmp_path / "odradek").iterdir()
    assert capsys.readouterr().err == f"odradek: unexpected ValueError: first line (details: {detail})\n"
    assert "second line" in detail.read_text()
    assert "test_an_unexpected_error_names_its_log" in detail.read_text()
    assert stat.S_IMODE(detail.stat().st_mode) == 0o600


def test_every_error_of_this_room_is_one_line_with_a_documented_exit_code() -> None:
    """Enumerated by code, so that no later one is forgotten."""
    kinds = [InfraError]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    assert {kind.exit_code for kind in kinds} <= {1, 2, 3}
    assert all(kind.__doc__ for kind in kinds)
