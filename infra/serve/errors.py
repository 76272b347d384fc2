"""Errors of serving a person. Each leaves the person's folder as it was, and says so where that is not obvious."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from odradek.infra.errors import InfraError
from odradek.streams.errors import SubjectErased


class ServeError(InfraError):
    """Base of what goes wrong between a person's folder and a session."""


class FolderRefused(ServeError):
    """The folder can't be copied as it stands: too large, not a directory, or git does not answer."""

    exit_code: ClassVar[int] = 2


class SubjectRefused(ServeError):
    """Nothing of this subject may be recorded, so nothing can be served."""

    exit_code: ClassVar[int] = 2

    @classmethod
    def erased(cls, subject: str) -> SubjectRefused:
        """Their key is destroyed, before the session or while it ran."""
        return cls(
            f"subject {subject!r} was erased: nothing of theirs is recorded any more, and nothing was changed; name "
            "another by --subject"
        )


class SessionRefused(ServeError):
    """The session can't be resumed or forked like this; the message says what is missing or what to ask instead."""

    exit_code: ClassVar[int] = 2


class ThroughLink(ServeError):
    """A path goes through a symbolic link, so that following it could leave the folder."""


class ApplyConflict(ServeError):
    """The folder is no longer what was copied. Nothing was changed; the conflicting paths are named."""

    exit_code: ClassVar[int] = 1

    def __init__(self, conflicts: list[str]) -> None:
        self.conflicts = conflicts
        shown = "; ".join(conflicts[:8]) + (f"; and {len(conflicts) - 8} more" if len(conflicts) > 8 else "")
        super().__init__(f"nothing was changed, because the folder is not what was copied any more: {shown}")


class ApplyFailed(ServeError):
    """The host refused a step (disk full, no permission). What had been done was undone."""


class SessionFault(ServeError):
    """The session could not be served to its end: a fault of ours, never the agent's."""


@contextmanager
def refusing_erased(subject: str) -> Iterator[None]:
    """Work for a subject that may be erased at any moment of it."""
    try:
        yield
    except SubjectErased as error:
        raise SubjectRefused.erased(subject) from error
