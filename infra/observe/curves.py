"""A run's curves as plain points, a step a weight version: for tools that draw them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.frame import version_rows


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One value of one curve."""

    name: str
    step: int
    """The weight version."""
    value: float
    time_ms: int


def curves(fold: RunFold) -> list[CurvePoint]:
    """Rollouts and held-out rates by version; what each training step said of itself, at the version it made."""
    points = []
    for row in version_rows(fold):
        at = fold.published.get(row.version, 0)
        values: dict[str, float] = {}
        if row.training.count:
            values |= {
                "rollouts/solve_rate": row.training.rate,
                "rollouts/reward_mean": row.reward,
                "rollouts/graded_sessions": row.training.count,
                "rollouts/reads_before_edit": row.reads_before_edit,
                "rollouts/parallel_turns": row.parallel_turns,
            }
        for name, rate in row.held_out.items():
            values[f"held_out_solve_rate/{name}"] = rate.rate
            values[f"held_out_sessions/{name}"] = rate.count
        points += [CurvePoint(name, row.version, value, at) for name, value in values.items()]
    for step in fold.steps:
        values = {f"training/{name}": value for name, value in step.metrics.items()} | {
            "training/seconds": step.seconds
        }
        points += [CurvePoint(name, step.step, value, step.time_ms) for name, value in values.items()]
    return points
