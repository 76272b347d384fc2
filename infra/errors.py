"""Errors of the infra room: what went wrong on this machine, said so that a person can act.

Each message carries what happened, where (component, path, address), what was expected and what to do next, on one
line. `exit_code` is what the command line returns for it; the codes are documented in `infra/cli/main.py`.
"""

from __future__ import annotations

from typing import ClassVar


class InfraError(Exception):
    """Base of every error that infra raises on purpose. Its text is one line, fit to be shown to a person."""

    exit_code: ClassVar[int] = 3

    @property
    def user_message(self) -> str:
        """The line that the command line prints."""
        return str(self)


class UsageError(InfraError):
    """The person's input can't be obeyed: a wrong key, value or option. Nothing was done."""

    exit_code: ClassVar[int] = 2


class StackError(InfraError):
    """The embedded stack, or a configured service, can't be used as it stands. Waiting will not change it."""


class MissingJava(StackError):
    """No Java 17 or newer for the embedded broker."""


class JarError(StackError):
    """The broker's jars can't be fetched, or are not those of the lock."""


class ComponentFailed(StackError):
    """A component of the embedded stack ended or misbehaved while it was started."""


class Unreachable(StackError):
    """A service did not answer within its deadline. A later try may succeed."""


class AnswerLost(InfraError):
    """Standard output is closed, or full: what the command did stands, and nobody can read its answer."""


class DiskFull(StackError):
    """Too little free space where the stack keeps its data."""
