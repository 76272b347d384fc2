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


def total(components: Mapping[str, float]) -> float:
    """Of components solved (0 or 1), turns and errors."""
    errors = min(components["errors"], MAX_ERRORS)
    return components["solved"] * (1.0 - TURN_COST * components["turns"]) - ERROR_COST * errors
