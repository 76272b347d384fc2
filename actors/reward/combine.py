"""The declared combination of a reward's components. Pure; its version is part of the grader's.

total = solved * (1 - TURN_COST * turns) - ERROR_COST * min(errors, MAX_ERRORS)

Turns cost, calls of one turn do not: parallel calls cost the longest of them, not the sum. The error term keeps an
unsolved session from being indifferent to failed calls.
"""

from __future__ import annotations

from collections.abc import Mapping

TURN_COST = 0.03
"""Share of the solved reward lost by each turn. Too low: calls are never made in parallel; too high: the agent stops
before it has verified."""
ERROR_COST = 0.05
"""Lost for each failed call. Too high teaches to do nothing."""
MAX_ERRORS = 4
"""Failed calls that cost; beyond this they cost nothing more."""
VERSION = "1"
FEEDBACK = {"accepted": 1.0, "followed_up": 0.5, "rejected": 0.0, "reverted": 0.0}
"""What a person's answer to a production session is worth, in the place of `solved`. A follow-up says that the change
was of use and not enough; a change that is taken back was of none, however it was received at first."""


def total(components: Mapping[str, float], outcome: str = "solved") -> float:
    """Of components turns, errors and the outcome: `solved` (0 to 1), or a production session's `feedback`."""
    errors = min(components["errors"], MAX_ERRORS)
    return components[outcome] * (1.0 - TURN_COST * components["turns"]) - ERROR_COST * errors
