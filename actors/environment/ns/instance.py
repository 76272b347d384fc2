"""What one driver keeps on disk, and what a later driver does with the remains of a dead one.

    STATE/ns-TOKEN.lock           locked by driver and zygote for as long as either lives
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

from odradek.actors.environment.ns.cgroup import SHARED
from odradek.actors.environment.ns.removal import remove_cgroups, remove_tree


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


def reap_dead(state: Path, cgroup_parents: list[Path]) -> int:
    """Remove what dead drivers left below `state`; the number of their sandboxes."""
    if not state.is_dir():
        return 0
    reaped = 0
    state_fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for lock in sorted(state.glob("ns-*.lock")):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                reaped += _reap(state, lock.stem, state_fd, cgroup_parents)
                lock.unlink()
    finally:
        os.close(state_fd)
    return reaped


def _reap(state: Path, name: str, state_fd: int, cgroup_parents: list[Path]) -> int:
    records = [_read_record(path) for path in (state / name / "records").glob("*")]
    for record in records:
        if record is not None and record.pid and start_ticks(record.pid) == record.start_ticks:
            os.kill(record.pid, signal.SIGKILL)
            _wait_gone(record)
    remove_tree(name, state_fd)
    remove_cgroups([str(parent / SHARED / name) for parent in cgroup_parents])
    return len(records)


def _read_record(path: Path) -> Record | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return None  # cut short by the crash: the sandbox was not yet made


def _wait_gone(record: Record, deadline_s: float = 5.0) -> None:
    end = time.monotonic() + deadline_s
    while start_ticks(record.pid) == record.start_ticks and time.monotonic() < end:
        time.sleep(0.01)


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 when there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])
