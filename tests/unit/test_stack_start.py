"""An `up` that fails says what failed, whoever watches it: on real processes, small ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from support.waiting import eventually_blocking

from odradek.infra.errors import ComponentFailed, Unreachable
from odradek.infra.stack import stack as stack_module
from odradek.infra.stack.component import Progress
from odradek.infra.stack.ports import LOOPBACK, answers, refused
from odradek.infra.stack.processes import spawn
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.testing import scratch

LISTEN = """
import socket, sys, time
with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
    time.sleep(120)
"""

STARTER = """
import subprocess, sys, time
service = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[1]])
print("started", service.pid, flush=True)
time.sleep(120)
"""
"""As `ray start`: it waits for a node, and does not see that its process has died."""


class Service:
    """A component that listens on one port, with hooks."""

    port_names = ("main",)
    start_deadline_s = 60.0
    stop_grace_s = 0.0
    error_logs: Mapping[Path, Path] = MappingProxyType({})

    def __init__(self, data: Path, name: str, *, script: str = LISTEN, detaches: bool = False) -> None:
        self.name, self.detaches = name, detaches
        self.cleaned: Callable[[], object] = lambda: None
        self.starting: Callable[[], object] = lambda: None
        self.checked: Callable[[], object] = lambda: None
        self._data, self._script = data, script

    def prepare(self, ports: Mapping[str, int], progress: Progress) -> None:
        (self._data / self.name).mkdir(exist_ok=True)

    def start(self, ports: Mapping[str, int], mark: str, log: Path) -> subprocess.Popen[bytes]:
        self.starting()
        command = [sys.executable, "-c", self._script, str(ports["main"]), LISTEN]
        return spawn(command, mark=mark, log=log, cwd=self._data)

    def address(self, ports: Mapping[str, int]) -> str:
        return f"{LOOPBACK}:{ports['main']}"

    def check(self, ports: Mapping[str, int], timeout_s: float) -> None:
        self.checked()
        if not answers(ports["main"], timeout_s):
            raise Unreachable(f"{self.name}: nothing listens on {self.address(ports)}")

    def listens(self, ports: Mapping[str, int]) -> tuple[int | Path, ...]:
        return (ports["main"],)

    def finish(self, ports: Mapping[str, int]) -> None:
        """Nothing."""

    def clean(self, ports: Mapping[str, int]) -> None:
        self.cleaned()


@pytest.fixture
def data() -> Iterator[Path]:
    with scratch() as folder:
        try:
            yield folder
        finally:
            Stack(folder, []).down()


def test_what_a_failed_up_ends_is_not_taken_for_a_service_that_died(data: Path) -> None:
    """Else the guard ends the command before it can say which service failed, and blames the others."""
    good = Service(data, "kafka")
    bad = Service(data, "ray", script="raise SystemExit('no room for the raylet')")
    stack = Stack(data, [good, bad])
    seen: list[dict[str, str]] = []
    bad.starting = lambda: seen.append(eventually_blocking(stack.watched, "the good one to be up", 60.0))
    good.cleaned = lambda: seen.append(stack.watched())
    with pytest.raises(
        ComponentFailed, match=r"^ray ended with exit code 1: no room for the raylet; log: /.*ray\.log$"
    ):
        stack.up()
    assert list(seen[0].values()) == [""], "it was watched, and well"
    assert seen[1:] and not any(seen[1:]), "the person is told of ray alone"
    assert {status.health for status in stack.status()} == {"stopped"}


def test_what_a_service_died_of_is_quoted_from_its_own_error_log(data: Path) -> None:
    """`ray start` prints hints; why the raylet died stands in the raylet's own file."""
    bad = Service(data, "ray", script="print('see the documentation'); raise SystemExit(1)")
    bad.error_logs = {data / f"{name}.err": data / "kept" / f"{name}.err" for name in ("empty", "raylet", "other")}
    (data / "empty.err").write_text("")
    (data / "raylet.err").write_text("Check failed: timed out waiting for file x\n*** StackTrace ***\n  at raylet\n")
    with pytest.raises(
        ComponentFailed, match=r"^ray ended with exit code 1: Check failed: timed out .* x; log: .*kept/raylet\.err$"
    ):
        Stack(data, [bad]).up()


def test_while_an_up_is_under_way_status_says_what_is_starting_and_does_not_ask_it(data: Path) -> None:
    """A service that is starting could not answer in time: its check may take a minute."""
    good, slow = Service(data, "kafka"), Service(data, "ray")
    stack = Stack(data, [good, slow])
    slow.starting = lambda: eventually_blocking(stack.watched, "the good one to be up", 60.0)
    asked: list[dict[str, str]] = []

    def look() -> None:
        slow.checked = lambda: None
        asked.append({status.name: status.health for status in stack.status()})

    slow.checked = look
    stack.up()
    assert asked == [{"kafka": "running", "ray": "starting"}]
    assert {status.health for status in stack.status()} == {"running"}


def test_a_service_that_dies_under_its_starter_is_seen_before_the_starter_gives_up(data: Path) -> None:
    """`ray start` waits for half a minute for a raylet that is dead."""
    starter = Service(data, "ray", script=STARTER, detaches=True)
    stack = Stack(data, [starter])
    said: list[str] = []
    up: list[bool] = []

    def kill_it(_component: str, message: str) -> None:
        said.append(message)
        (status,) = stack.status()
        up.append(not refused(int(status.address.rpartition(":")[2])))
        if up[-2:] == [True, True]:  # whoever waits for it has seen it too
            subprocess.run(["kill", "-9", (data / "ray" / "ray.log").read_text().split()[1]], check=True)

    with pytest.raises(
        ComponentFailed, match=r"^ray died while it was starting \(nothing listens on .*\): started \d+"
    ):
        stack.up(kill_it)
    assert said[0] == "starting" and all("(its starter still runs)" in line for line in said[1:])


def test_a_service_that_is_there_and_slow_is_waited_for_and_not_started_again(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray that is started again takes every actor with it."""
    monkeypatch.setattr(stack_module, "SAY_S", 0.25)
    busy = Service(data, "ray")
    stack = Stack(data, [busy])
    before = stack.up().components[0].pids
    said: list[str] = []

    asked: list[int] = []

    def slow() -> None:
        asked.append(len(said))
        if len(said) < 2:
            raise Unreachable("ray: no answer within 45 s")

    busy.checked = slow
    assert [status.health for status in stack.status()] == ["silent"]
    asked.clear()
    assert stack.up(lambda _component, message: said.append(message)).started == ()
    assert said == ["is there and does not answer yet (ray: no answer within 45 s)"] * 2
    assert asked.count(1) > 1, "it is not said at every look"
    assert stack.status()[0].pids == before


def test_a_service_that_hangs_is_started_again_in_the_end(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "HUNG_S", 0.2)
    hung = Service(data, "ray")
    stack = Stack(data, [hung])
    before = stack.up().components[0].pids
    said: list[str] = []

    def silent() -> None:
        if "starting" not in said:
            raise Unreachable("ray: no answer within 45 s")

    hung.checked = silent
    result = stack.up(lambda _component, message: said.append(message))
    assert result.started == ("ray",) and result.components[0].pids != before
    assert any(line.startswith("has not answered for ") and line.endswith("starting it again") for line in said)
