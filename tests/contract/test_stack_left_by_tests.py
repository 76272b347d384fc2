"""What a test session or the fault harness started is gone once it ends, however it is ended; real processes each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.crash.host import command_of, processes_of
from support.waiting import eventually_blocking

from odradek.infra.stack.testing import PREFIX, S3_VARIABLE, end_abandoned, scratch

pytestmark = pytest.mark.contract

TESTS = Path(__file__).parents[1]
SESSION = """
import threading

def test_that_lasts(s3_endpoint):
    print("up", flush=True)
    threading.Event().wait(600)
"""
UP_S, END_S = 120.0, 120.0
"""Seconds for a store to be there, and for everything to be gone."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder of this test's own: whatever is in it was left there by its processes."""
    with scratch() as folder:
        yield folder
        for pid in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != S3_VARIABLE}
    environment |= {"TMPDIR": str(place), "PYTHONPATH": str(TESTS)}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=place, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup it is ignored, and stays so
    )  # fmt: skip


def session(place: Path) -> subprocess.Popen[str]:
    """A test session with a store of its own, once that is up."""
    (place / "test_lasting.py").write_text(SESSION)
    process = start(place, "pytest", "-s", "-q", "-p", "no:cacheprovider", "-p", "conftest", "test_lasting.py")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("up"):
            return process
    raise AssertionError(f"the session ended with {process.wait()} before its store was up")


def left(place: Path) -> list[str]:
    """Processes and folders that what ran in the place has left."""
    return [*(command_of(pid) for pid in processes_of(place)), *(found.name for found in place.glob(f"*{PREFIX}*"))]


def ended(process: subprocess.Popen[str], number: signal.Signals) -> int:
    process.send_signal(number)
    told, _ = process.communicate(timeout=END_S)
    print(told)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_session_that_is_told_to_end_stops_its_services(place: Path, number: signal.Signals) -> None:
    running = session(place)
    assert left(place)
    assert ended(running, number) == pytest.ExitCode.INTERRUPTED
    assert left(place) == []


def test_the_next_session_stops_what_a_killed_one_left(place: Path) -> None:
    ended(session(place), signal.SIGKILL)
    (killed,) = place.glob(f"{PREFIX}*")
    assert processes_of(killed), "its store lives on"
    following = session(place)
    assert not killed.exists() and not processes_of(killed)
    ended(following, signal.SIGTERM)
    assert left(place) == []


def test_a_folder_that_is_in_use_is_nobody_elses_to_take(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with scratch() as mine:
        assert end_abandoned() == [] and mine.is_dir()
        with scratch() as second:
            assert mine.is_dir() and second.is_dir()
    assert left(place) == []


def test_the_fault_harness_that_is_told_to_end_stops_its_deployment(place: Path) -> None:
    report = place / "report.md"
    harness = start(place, "support.crash", "--faults", "1", "--report", str(report))
    eventually_blocking(lambda: any("weed" in command_of(pid) for pid in processes_of(place)), "its store", UP_S)
    assert ended(harness, signal.SIGTERM) == 130
    assert left(place) == []
    assert "0 of 1 faults; no guarantee was checked" in report.read_text()
