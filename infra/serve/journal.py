"""The journal of one application of changes: what was about to be done, kept outside the folder until it is done.

It lies in the user's own state folder, never in the folder that is changed: a folder that somebody else wrote must not
be able to hold a journal that we would act upon. One file and one lock a folder; written whole, renamed in, synced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from odradek.infra.serve.errors import ServeError

LOCK_SECONDS = 10.0
"""Seconds to wait for another process that applies changes to the same folder. It takes milliseconds."""

Action = Literal["remove", "prune", "mkdir", "put"]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation. `before` and `after` are digests, with a kind in front; empty means that nothing is there."""

    action: Action
    path: str
    slot: int = 0
    """Name of its files in the staging folder: `new-N`, `old-N`."""
    before: str = ""
    after: str = ""
    mode: int = 0
    """Final mode of what is put or made; former mode of a directory that is pruned."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """One application."""

    root: str
    staging: str
    """Name of the staging folder in the root."""
    phase: Literal["staging", "ready", "done"]
    """`staging`: the folder is as it was. `ready`: all that is needed to finish is staged, some may be done. `done`:
    all is done. In the first and the last only the staging folder is left to remove."""
    steps: list[Step]


def state_folder() -> Path:
    """Where journals lie."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "odradek" / "apply"


class JournalFile:
    """The journal of one folder, held locked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Journal | None:
        """The unfinished application, if there is one."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Journal)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ServeError(f"{self.path}: can't be read ({error}); move it away once you have looked") from error

    def write(self, journal: Journal) -> None:
        """Durable on return."""
        temporary = self.path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(journal))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        sync_folder(self.path.parent)

    def remove(self) -> None:
        """The application is over; durable on return."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)


@contextlib.contextmanager
def journal_of(root: Path, wait_s: float = LOCK_SECONDS) -> Iterator[JournalFile]:
    """The journal of a folder, locked against other processes; ServeError if one of them keeps it."""
    folder = state_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
    lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServeError(f"{root}: another odradek applies changes there; try again") from None
                time.sleep(0.05)
        yield JournalFile(folder / f"{name}.json")
    finally:
        os.close(lock)


def sync_folder(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
