"""Errors of the reward room."""

from __future__ import annotations


class RewardError(Exception):
    """Base of the room's errors."""


class GraderCouldNotRun(RewardError):
    """The grader did not get to judge: ungraded with this cause. `retryable` asks for a fresh attempt."""

    def __init__(self, cause: str, retryable: bool = True) -> None:
        super().__init__(cause)
        self.cause = cause
        self.retryable = retryable

    def __reduce__(self) -> tuple[type[GraderCouldNotRun], tuple[str, bool]]:
        return type(self), (self.cause, self.retryable)


class UnknownGrader(RewardError):
    """This build has no such grader, or not that version of it."""


class NotRescored(RewardError):
    """Some sessions could not be scored again for a fault of ours; nothing was sealed. Running it again goes on."""
