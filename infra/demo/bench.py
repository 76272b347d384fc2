"""`make bench-demo`: the demo three times, on three seeds, with larger sets and greedy evaluation beside sampling.

Each seed is a deployment of its own (its own topics and checkpoints) on the same services, so nothing is shared but
the warm start. The window is counted in steps, so a busy machine takes longer and trains the same. The gain of a set is
the mean over seeds of (last - first) in percentage points.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from odradek.infra.config.tree import Config
from odradek.infra.demo import summary
from odradek.infra.demo.family.sets import EVALUATION_SETS, TaskSet
from odradek.infra.demo.run import DemoOutcome

SEEDS = (0, 1, 2)
SIZES = {"new_combinations": 240, "unseen_identifiers": 120, "unseen_templates": 120}
"""Tasks of each set; the standard error of a rate of one half is then 3.2 and 4.6 points."""

STEPS = 40
"""Training steps of each seed, half as many again as the demo's eight minutes hold on two quiet cores. Too few: the
gain of one seed differs from the next one's by more than what is measured. Too many: an afternoon."""
MINUTES = 60.0
"""Longest training window of a seed, minutes: only a run that no longer moves meets it."""


def configurations(config: Config) -> list[Config]:
    """One configuration a seed."""
    prefix = config.kafka.prefix or "bench"
    return [
        msgspec.structs.replace(
            config,
            kafka=msgspec.structs.replace(config.kafka, prefix=f"{prefix}-{seed}"),
            demo=msgspec.structs.replace(
                config.demo, seed=seed, greedy=True, steps=config.demo.steps or STEPS, minutes=MINUTES, **SIZES
            ),
        )
        for seed in SEEDS
    ]


def gains(outcomes: Sequence[DemoOutcome], task_set: TaskSet, *, greedy: bool) -> list[float]:
    """Percentage points gained on a set, by seed."""
    pairs = [(o.greedy_first, o.greedy_last) if greedy else (o.first, o.last) for o in outcomes]
    return [100 * (last[task_set].solve_rate - first[task_set].solve_rate) for first, last in pairs]


def as_json(outcomes: Mapping[int, DemoOutcome]) -> dict[str, Any]:
    """Every run by seed, and the mean gains."""
    return {
        "runs": {str(seed): summary.as_json(outcome) for seed, outcome in outcomes.items()},
        "mean_gain_points": {
            how: {s: statistics.fmean(gains(list(outcomes.values()), s, greedy=greedy)) for s in EVALUATION_SETS}
            for how, greedy in (("sampled", False), ("greedy", True))
        },
    }


def as_text(outcomes: Mapping[int, DemoOutcome]) -> str:
    """The runs one after another, then the mean gains."""
    lines = [f"=== seed {seed} ===\n{summary.as_text(o)}" for seed, o in outcomes.items()]
    lines.append(f"Mean gain over seeds {', '.join(map(str, outcomes))}, percentage points (each seed)")
    for how, greedy in (("sampled", False), ("greedy", True)):
        for task_set in EVALUATION_SETS:
            values = gains(list(outcomes.values()), task_set, greedy=greedy)
            each = ", ".join(f"{value:+.1f}" for value in values)
            lines.append(f"  {how:8s} {task_set:20s} {statistics.fmean(values):+.1f}  ({each})")
    return "\n".join(lines)
