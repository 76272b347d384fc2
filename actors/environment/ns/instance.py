"""What one driver keeps on disk, and what a later driver does with the remains of a dead one.

    STATE/ns-TOKEN.lock           locked by driver and zygote for as long as either lives; names the driver's cgroups,
                                  and goes last of all, so that nothing is left that nobody knows of
    STATE/ns-TOKEN/records/ID     a sandbox's record, written before it is made
    STATE/ns-TOKEN/s/ID/{u,w}     its upper and work directories
    STATE/ns-TOKEN/f/N            frozen uppers, shared by forks
    STATE/ns-TOKEN/m              where each init mounts its root, in its own mount namespace only

Namespaces die with their processes, and processes with their driver, so a sandbox is never adopted by another driver:
the session rebuilds it from the log. `reap_dead` ends and removes all that is left of drivers whose lock is free.
"""

import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from odradek.actors.environment.ns import cgroup
from odradek.actors.environment.ns.removal import remove_tree

GONE_DEADLINE_S = 5.0
"""Seconds the kernel gets to end a killed process. Too low leaves its group to the next start."""


class Record(msgspec.Struct):
    """Intent first (`pid` 0), result after."""

    sandbox_id: str
    labels: Mapping[str, str]
    created_at: float
    lifetime_s: float
    pid: int = 0
    start_ticks: int = 0
    """The process's start time as /proc has it: a reused pid has another."""


class Instance(NamedTuple):
    """The open directories of a live driver."""

    name: str
    state_fd: int
    fd: int
    lock_fd: int

    def write_record(self, record: Record) -> None:
        path = f"records/{record.sandbox_id}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644, dir_fd=self.fd)
        try:
            os.write(fd, msgspec.json.encode(record))
        finally:
            os.close(fd)

    def note_cgroups(self, paths: list[str]) -> None:
        """Before they are made. Not worked out again by whoever reaps: that process may be in other groups."""
        os.pwrite(self.lock_fd, msgspec.json.encode(paths), 0)

    def forget_record(self, sandbox_id: str) -> None:
        remove_tree(f"records/{sandbox_id}", self.fd)

    def close(self) -> None:
        for fd in (self.fd, self.lock_fd, self.state_fd):
            os.close(fd)


def open_instance(state: Path, owner: int) -> Instance:
    """Make a new instance below `state`, owned by the sandbox user."""
    state.mkdir(parents=True, exist_ok=True)
    state_fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _give(state_fd, owner)
    name = f"ns-{secrets.token_hex(4)}"
    lock_fd = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=state_fd)
    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.mkdir(name, 0o755, dir_fd=state_fd)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=state_fd)
    _give(fd, owner)
    for part in ("records", "s", "f", "m"):
        os.mkdir(part, 0o755, dir_fd=fd)
        if os.geteuid() == 0:
            os.chown(part, owner, owner, dir_fd=fd)
    return Instance(name, state_fd, fd, lock_fd)


def _give(fd: int, owner: int) -> None:
    if os.geteuid() == 0:
        os.fchown(fd, owner, owner)


def reap_dead(state: Path) -> int:
    """Remove what dead drivers left below `state`; the number of their sandboxes. What can't be removed yet (a process
    that does not end) keeps its lock file, for the next time."""
    if not state.is_dir():
        return 0
    reaped = 0
    state_fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for lock in sorted(state.glob("ns-*.lock")):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reaped += _reap(state, lock.stem, state_fd)
                groups = _noted_cgroups(file.read(), lock.stem)
                cgroup.kill_members(groups)
                if not cgroup.remove_parents(groups, GONE_DEADLINE_S):
                    lock.unlink()
    finally:
        os.close(state_fd)
    return reaped


def _noted_cgroups(note: bytes, name: str) -> list[str]:
    """What the dead driver noted, if it can be its own."""
    try:
        paths = msgspec.json.decode(note or b"[]", type=list[str])
    except msgspec.DecodeError:
        return []
    return [path for path in paths if path.endswith(f"/{cgroup.SHARED}/{name}") and ".." not in path]


def _reap(state: Path, name: str, state_fd: int) -> int:
    records = [_read_record(path) for path in (state / name / "records").glob("*")]
    for record in records:
        if record is not None and record.pid and start_ticks(record.pid) == record.start_ticks:
            os.kill(record.pid, signal.SIGKILL)
            _wait_gone(record)
    remove_tree(name, state_fd)
    return len(records)


def _read_record(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None  # cut short by the crash: the sandbox was not yet made


def _wait_gone(record: Record) -> None:
    end = time.monotonic() + GONE_DEADLINE_S
    while start_ticks(record.pid) == record.start_ticks and time.monotonic() < end:
        time.sleep(0.01)


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
