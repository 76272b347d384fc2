"""A guarded command: whoever ends it, it ends with one line and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import eventually_blocking

from odradek.infra.stack import processes
from odradek.infra.stack.ray_head import RayHead
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import stack_id
from odradek.infra.stack.testing import scratch

pytestmark = pytest.mark.contract

COMMAND = """
import ctypes, os, signal, sys, time
from pathlib import Path
import click
from odradek.infra.cli import context as shared, main
from odradek.infra.cli import guard
from odradek.infra.cli.guard import run_guarded

guard.LOOK_S, guard.GONE_S = 0.1, 0.5
looks = iter(range(10**9))

def started_before():
    return {"one 1": "one: is gone"}

def started_since():
    return {"one 1": "one: is gone"} if next(looks) == 0 else {"one 2": "one: is gone again"}

def cleaned(how):
    print("cleaned up", file=sys.stderr)
    return how

@click.command
@click.argument("what")
@click.argument("folder")
@shared.command_options
def command(context, what, folder):
    watched = {"before": started_before, "since": started_since}.get(what, dict)
    run_guarded(lambda: work(what), cleaned, watched, Path(folder))

def work(what):
    print("progress", file=sys.stderr)
    if what == "crash":
        os.write(2, b"*** SIGABRT received ***\\nstack of a library\\n")
        os._exit(1)
    if what == "abort":
        os.abort()
    if what == "fail":
        raise shared.CaseFailed("one case failed")
    if what == "before":
        time.sleep(20 * guard.GONE_S)
    if what in ("wait", "since"):
        try:
            print("working", os.getpid(), flush=True)
            for _ in range(1200):  # a signal just before one long sleep would be seen when that ends
                time.sleep(0.1)
        finally:
            print("tidied", file=sys.stderr)

sys.modules["odradek.infra.cli.demo"] = sys.modules[__name__]
main._exists = lambda name: True
main.main()
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMAND, "demo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def working(process: subprocess.Popen[str]) -> int:
    """Once it works: the pid of its child."""
    assert process.stdout is not None
    return int(process.stdout.readline().split()[1])


@pytest.mark.parametrize(("what", "code", "said"), [("end", 0, []), ("fail", 1, ["odradek: one case failed"])])
def test_an_end_of_its_own_is_passed_on_and_nothing_is_added(
    tmp_path: Path, what: str, code: int, said: list[str]
) -> None:
    process = start(what, str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()) == (code, ["progress", *said])


@pytest.mark.parametrize(("what", "how"), [("crash", "exit code 1"), ("abort", "signal 6")])
def test_an_end_from_outside_is_cleaned_up_and_is_one_line(tmp_path: Path, what: str, how: str) -> None:
    process = start(what, str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert errors.splitlines()[:2] == ["progress", "cleaned up"]
    (line,) = errors.splitlines()[2:]
    assert line.startswith(f"odradek: ended from outside by {how}")
    kept = tmp_path / "driver.log"
    assert ("stack of a library" in kept.read_text()) if what == "crash" else not kept.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_command_once_and_lets_it_tidy_up(tmp_path: Path, number: signal.Signals) -> None:
    process = start("wait", str(tmp_path))
    working(process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert errors.splitlines()[:2] == ["progress", "tidied"]
    assert "cleaned up" not in errors


def test_a_service_that_died_before_anybody_looked_ends_the_command(tmp_path: Path) -> None:
    _, errors = start("since", str(tmp_path)).communicate(timeout=60)
    assert errors.splitlines() == ["progress", "cleaned up", "odradek: one: is gone again"]


def test_a_service_of_an_earlier_run_that_is_being_started_again_does_not(tmp_path: Path) -> None:
    process = start("before", str(tmp_path))
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()) == (0, ["progress"])


def test_a_killed_parent_takes_the_command_along_which_tidies_up(tmp_path: Path) -> None:
    process = start("wait", str(tmp_path))
    child = processes.name_of(working(process))
    assert child is not None
    process.kill()
    _, errors = process.communicate(timeout=60)  # until the child has closed it too
    assert errors.splitlines() == ["progress", "tidied"]
    eventually_blocking(lambda: not processes.alive(child), "the command to be gone")


# -- with Ray --------------------------------------------------------------------------------------------------------

DRIVER = """
import contextlib, sys, time
from pathlib import Path
import click
from odradek.infra.cli import context as shared, main
from odradek.infra.cli.guard import guarded

@click.command
@shared.command_options
@guarded
def command(context):
    from odradek.infra.config.services import data_dir
    from odradek.infra.stack.ray_head import RayHead, connect
    from odradek.infra.stack.stack import Stack

    data = data_dir(context.config)
    stack = Stack(data, [RayHead(data)])
    stack.up(context.progress)
    ray = connect(stack.address("ray"))

    @ray.remote
    class Echo:
        def said(self, value):
            return value

    echo = Echo.options(num_cpus=0).remote()
    assert ray.get(echo.said.remote("x"), timeout=120) == "x"
    print("working", flush=True)
    while True:  # as the demo, to which an actor that does not answer is one that is being started again
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(echo.said.remote("x"), timeout=60)
        time.sleep(0.1)

sys.modules["odradek.infra.cli.demo"] = sys.modules[__name__]
main._exists = lambda name: True
main.main()
"""


@pytest.fixture
def data() -> Iterator[Path]:
    with scratch() as folder:
        try:
            yield folder
        finally:
            Stack(folder, [RayHead(folder)]).down()


@pytest.mark.parametrize("victim", ["raylet", "gcs_server"])
def test_a_ray_that_dies_ends_the_command_in_one_line_and_nothing_is_left(data: Path, victim: str) -> None:
    mark = f"{stack_id(data)}/"
    command = [sys.executable, "-c", DRIVER, "demo", "--data", str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        victims = [one.pid for one in processes.marked(mark) if _program(one.pid) == victim]
        assert victims
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    lines = [line for line in errors.splitlines() if not line.startswith("[")]
    assert (process.returncode, len(lines)) == (3, 1), errors
    assert re.match(r"odradek: (ended from outside by .* \()?ray: nothing listens on ", lines[0]), (
        "whoever saw it first"
    )
    assert lines[0].endswith("the command was ended and what it had started is stopped")
    assert processes.marked(mark) == []


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""
