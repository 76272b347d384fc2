"""Errors of the task family: every generation is bounded, and running out of a bound is one of these."""


class FamilyError(Exception):
    """Base of this room's errors; terminal, since the same (seed, set, index) fails the same way again."""


class NamesExhausted(FamilyError):
    """No unused identifier was found within the bound of tries."""


class TaskNotFound(FamilyError):
    """No valid task came up within the bound of tries for one (seed, set, index)."""


class NotBounded(FamilyError):
    """A source leaves the subset of Python whose run time is known to be bounded, so it is not run."""
