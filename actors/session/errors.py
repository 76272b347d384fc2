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


class ReplayDivergence(SessionError):
    """Terminal: a record is not what the state machine produces from those before it."""

    def __init__(self, session_id: str, topic: str, partition: int, offset: int, expected: str, found: str) -> None:
        super().__init__(
            f"session {session_id} diverges at {topic}/{partition}@{offset}: expected {expected}; found {found}. What "
            "follows was not looked at; `odradek audit verify` says whether a record was changed after it was written"
        )
        self.session_id, self.topic, self.partition, self.offset = session_id, topic, partition, offset
        self.expected, self.found = expected, found

    def __reduce__(self) -> tuple[type[ReplayDivergence], tuple[str, str, int, int, str, str]]:
        place = (self.topic, self.partition, self.offset)
        return ReplayDivergence, (self.session_id, *place, self.expected, self.found)
