"""Errors of the session room. Terminal and retryable are types."""

from __future__ import annotations


class SessionError(Exception):
    """Base of the room's errors."""


class EngineUnavailable(SessionError):
    """Retryable: the inference actor did not answer or was restarted. Sampling is repeatable, so it is asked again."""


class EnvironmentLost(SessionError):
    """Retryable: the environment actor or the sandbox is gone. The workspace is rebuilt from the log."""


class ForkPointError(SessionError):
    """Terminal: the parent has no such turn on the log."""


class SuperfluousOwner(SessionError):
    """Terminal for this owner: a newer epoch exists; stop without writing."""


class SessionInfraFailure(SessionError):
    """Terminal: retries are used up. Logged as session.failed, never scored."""
