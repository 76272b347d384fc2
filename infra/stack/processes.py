"""Processes of the stack: started in sessions of their own, named by pid *and* start time, ended whole.

A pid alone names nothing: it may be given again after a crash or a reboot. So every process is remembered as
(pid, start time, boot), is signalled through a pidfd that was checked against that name, and is never touched when the
name no longer fits. What a component's processes start in turn carries the component's mark in its environment, so
`marked` finds it even when the launcher was killed before it could write anything down; `in_sessions` finds what has
written over its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from odradek.infra.deadline import Deadline
from odradek.infra.errors import ComponentFailed

MARK = "ODRADEK_STACK_MARK"
"""Environment variable that the stack's processes inherit: `<stack id>/<component>`."""

POLL_S = 0.05
"""Seconds between two looks at a process or port. Lower costs CPU, higher delays start and stop."""

LOG_TAIL_LINES = 3
"""How many last log lines an error of a component quotes."""

_STACK_FRAME = ("at ", "... ")
"""How lines of a Java stack trace begin; the cause above them is what helps."""

_THREADS_FIELD, _START_TIME_FIELD = 17, 19
"""Indices of `num_threads` and `starttime` in /proc/PID/stat, counted after the command's closing bracket."""


class ProcessName(msgspec.Struct, frozen=True):
    """One process for ever: no later process has the same three values."""

    pid: int
    start_ticks: int
    boot: str


def boot_id() -> str:
    """The kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def name_of(pid: int) -> ProcessName | None:
    """The process's name; None if there is none, or it is only a zombie waiting for its parent. One whose first thread
    has ended and others have not is no such: until the last has ended it holds its files and ports."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X") and int(fields[_THREADS_FIELD]) <= 1:
        return None
    return ProcessName(pid, int(fields[_START_TIME_FIELD]), boot_id())


def alive(name: ProcessName) -> bool:
    """Whether that very process still runs."""
    return name_of(name.pid) == name


def marked(prefix: str) -> list[ProcessName]:
    """Every process of ours whose mark starts with `prefix`: `<stack id>/` or `<stack id>/<component>`."""
    wanted = f"{MARK}={prefix}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        name = name_of(int(entry.name))
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if name is not None and any(item.startswith(wanted) for item in environment.split(b"\0")):
            found.append(name)
    return [name for name in found if name.pid != os.getpid() and alive(name)]


def session_of(name: ProcessName) -> int | None:
    """The session that the process is in; None if it is gone."""
    try:
        found = os.getsid(name.pid)
    except ProcessLookupError:
        return None
    return found if alive(name) else None


def in_sessions(sessions: Iterable[int]) -> list[ProcessName]:
    """Every process in these sessions.

    For processes that lost their mark: whoever sets a title (Ray's agents and workers do) writes over its environment.
    Sessions are named by a number that can't be given again while a member lives: ask while you know one that does.
    """
    wanted = set(sessions) - {os.getsid(0)}
    found = [name_of(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [name for name in found if name is not None and session_of(name) in wanted]


def spawn(
    command: Sequence[str], *, mark: str, log: Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, its output appended to `log`, its input closed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **(env or {}), MARK: mark}
    with log.open("ab") as output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ComponentFailed(f"can't run {command[0]}: {error.strerror}; log: {log}") from error


def send(name: ProcessName, number: signal.Signals) -> bool:
    """Signal exactly that process; False if it is gone. The pidfd closes the gap between check and signal."""
    try:
        handle = os.pidfd_open(name.pid)
    except OSError:
        return False
    try:
        if not alive(name):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def end_all(find: Callable[[], Iterable[ProcessName]], deadline: Deadline, grace_s: float) -> list[ProcessName]:
    """Ask every found process to end, then kill what remains after `grace_s`; returns what outlived the deadline.

    `find` is asked again each round, so processes that appear while others end (a worker forked late) are met too.
    """
    asked: set[ProcessName] = set()
    started = time.monotonic()
    while remaining := list(find()):
        if deadline.expired:
            return remaining
        hard = time.monotonic() - started > grace_s
        for name in remaining:
            if hard:
                send(name, signal.SIGKILL)
            elif name not in asked:
                send(name, signal.SIGTERM)
                asked.add(name)
        _collect_children(remaining)
        time.sleep(POLL_S)
    return []


def _collect_children(names: Iterable[ProcessName]) -> None:
    """Take the exit status of those that are our own children, so that no zombie stays in this process."""
    for name in names:
        try:
            os.waitpid(name.pid, os.WNOHANG)
        except OSError:
            continue


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log on one line, for an error message."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return "no log"
    told = (line.strip() for line in text.splitlines())
    kept = [line for line in told if line and not line.startswith(_STACK_FRAME)][-lines:]
    return " | ".join(line[:200] for line in kept) or "empty log"
