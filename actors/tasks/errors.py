"""Errors of the task room: a task directory that cannot be used. All are terminal: the person has to mend the files.

Each message is one line per fault, `FILE:LINE: what is wrong`, fit to be shown as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class TaskError(Exception):
    """Base of every error of `odradek.actors.tasks`."""

    exit_code: ClassVar[int] = 2
    """What the command line returns: the input is wrong, and nothing was done."""


class TaskFileError(TaskError):
    """One file of a task directory is missing or malformed."""

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        self.path = path
        self.line = line
        self.reason = " ".join(reason.split())
        super().__init__(path, line, reason)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else f"{self.path}: {self.reason}"


class BrokenTasks(TaskError):
    """Some directories of a set are broken, so none of the set is used: a smaller set would pass unseen."""

    def __init__(self, faults: list[TaskFileError], total: int) -> None:
        self.faults = faults
        self.total = total
        super().__init__(faults, total)

    def __str__(self) -> str:
        head = f"{len(self.faults)} of {self.total} task directories cannot be used; none was taken"
        return "\n".join((head, *(str(fault) for fault in self.faults)))


class TaskNotPublishable(TaskError):
    """The task is well-formed as a directory or file, but a published task cannot be like this."""
