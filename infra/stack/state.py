"""The one file that says what of the stack runs where: `state.json` in the data folder.

Written whole and by rename, readable by its owner only, and free of secrets. It is a note about this machine, not
truth about any session: losing it loses no event, only the memory of ports (processes are found by their mark).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from odradek.infra.deadline import Deadline
from odradek.infra.errors import StackError, UsageError
from odradek.infra.stack.processes import POLL_S, ProcessName

STATE_VERSION = 1

SERVICES_LOCK = "lock"
ACTORS_LOCK = "actors.lock"
"""Held by the `up` that starts the actors. Not the services' lock: a `down` need not wait for actors."""

LOCK_DEADLINE_S = 180.0
"""Seconds that `up` or `down` waits for another one on the same data. Less than a cold start would fail needlessly."""


class ComponentState(msgspec.Struct, frozen=True):
    """One embedded component: its address, ports, processes and log."""

    address: str
    ports: dict[str, int]
    processes: tuple[ProcessName, ...] = ()
    log: str = ""
    started_at: float = 0.0


class StackState(msgspec.Struct, frozen=True):
    """What the file holds."""

    version: int = STATE_VERSION
    components: dict[str, ComponentState] = {}
    stopping: bool = False
    """A `down` has begun: what is gone is meant to be."""

    def with_component(self, name: str, component: ComponentState) -> StackState:
        """The state with one component set."""
        return msgspec.structs.replace(self, components={**self.components, name: component})


def stack_id(data: Path) -> str:
    """The name that marks a data folder's processes: made from its path, so that it can't be lost with a file."""
    return hashlib.sha256(os.fsencode(data.resolve())).hexdigest()[:12]


def state_path(data: Path) -> Path:
    """Where the state of a data folder lies."""
    return data / "state.json"


def read_state(data: Path) -> StackState:
    """The state on disk; a new one if there is none; `StackError` if it can't be understood."""
    path = state_path(data)
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return StackState()
    try:
        state = msgspec.json.decode(text, type=StackState)
    except msgspec.MsgspecError as error:
        raise StackError(f"{path} is not a stack state ({error}); move it away and run: odradek up") from error
    if state.version != STATE_VERSION:
        raise StackError(f"{path} has version {state.version}, this build reads {STATE_VERSION}; use that build's down")
    return state


def write_state(data: Path, state: StackState) -> None:
    """Replace the file in one step."""
    write_private(state_path(data), msgspec.json.format(msgspec.json.encode(state), indent=2))


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def owned(data: Path, what: str) -> Iterator[None]:
    """One run on a data folder at a time, for as long as the block lasts: it stops at its end what others would then
    miss. Raises `UsageError` naming who has the folder. The kernel frees it when the owner dies."""
    data.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(data / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(_taken(data, os.pread(descriptor, 200, 0).decode(errors="replace"))) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{what} (process {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def under_way(data: Path, name: str = SERVICES_LOCK) -> bool:
    """Whether somebody holds that lock now. Waits for nothing and makes nothing."""
    try:
        descriptor = os.open(data / name, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_not_owned(data: Path) -> None:
    """Raises `UsageError` while a run has the folder."""
    if (data / "owner").exists():
        with owned(data, "nobody"):
            pass


def _taken(data: Path, owner: str) -> str:
    return (
        f"{owner or 'another run'} has {data} and stops its services at its end: wait for that, end it with "
        f"odradek down --data {data}, or name another folder with --data"
    )


@contextmanager
def locked(data: Path, wait_s: float = LOCK_DEADLINE_S, name: str = SERVICES_LOCK) -> Iterator[None]:
    """One `up` or `down` at a time on a data folder's services (or actors, by `name`). The kernel frees the lock when
    its holder dies."""
    data.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(data / name, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = Deadline(wait_s)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.expired:
                    raise StackError(f"another up or down on {data} did not end within {wait_s:.0f} s") from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)
