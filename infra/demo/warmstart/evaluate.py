"""Solve rates of a policy in one process: `python -m odradek.infra.demo.warmstart.evaluate [DIR]`.

Samples each held-out set at temperature 1 (`--greedy`: temperature 0) and prints rates with 95 % intervals and what
the agent did. Held-out tasks only; a set's tasks are the same at each call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
import torch

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.weights import build
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH, shipped_template
from odradek.infra.demo.family.sets import EVALUATION_SETS, TaskSet, tasks
from odradek.infra.demo.intervals import wilson
from odradek.infra.demo.warmstart.rollouts import Rollout, rate, run_sessions
from odradek.kernels.numerics import numerics_id

TASK_SEED = 1
"""Seed of the evaluated tasks; the demo evaluates others."""


def engine_for(policy: Policy) -> Engine:
    """An engine that serves `policy` as version 0."""
    engine = Engine(policy.config, numerics_id())
    engine.install(build(policy.config, 0, to_hf_state(policy)))
    return engine


def evaluate(policy: Policy, name: TaskSet, count: int, temperature: float = 1.0) -> list[Rollout]:
    """One session for each of `count` tasks of a set."""
    chosen = [(task, 1000 + i) for i, task in enumerate(tasks(name, TASK_SEED, count))]
    return run_sessions(engine_for(policy), shipped_template(), chosen, temperature)


def summary(rollouts: Sequence[Rollout]) -> str:
    """One line: solve rate with interval, then behaviour."""
    n, good = len(rollouts), sum(r.solved for r in rollouts)
    low, high = wilson(good, n)
    return (
        f"{100 * good / n:5.1f} % solved ({100 * low:.0f}-{100 * high:.0f}, n={n})"
        f"  read before edit {rate([r.read_before_edit for r in rollouts]):.2f}"
        f"  tested after edit {rate([r.tested_after_edit for r in rollouts]):.2f}"
        f"  parallel {rate([r.parallel for r in rollouts]):.2f}"
        f"  turns {sum(r.turns for r in rollouts) / n:.1f}"
        f"  errors {sum(r.errors for r in rollouts) / n:.2f}"
        f"  sampled {sum(sum(r.sampled) for r in rollouts) / n:.0f} of {sum(len(r.tokens) for r in rollouts) / n:.0f}"
    )


@click.command(help="Measure a policy directory (default: the shipped warm start) on the held-out sets.")
@click.argument("directory", type=click.Path(path_type=Path, exists=True), default=TOKENIZER_PATH.parent)
@click.option("--count", type=int, default=120, show_default=True, help="Tasks of each set.")
@click.option("--greedy", is_flag=True, help="Take the most probable token.")
@click.option("--set", "sets", type=click.Choice(get_args(TaskSet)), multiple=True, help="Only this set (repeatable).")
def main(directory: Path, count: int, greedy: bool, sets: tuple[TaskSet, ...]) -> None:
    torch.set_num_threads(1)
    policy = Policy.load_hf(directory)
    for name in sets or EVALUATION_SETS:
        begun = time.monotonic()
        rollouts = evaluate(policy, name, count, 0.0 if greedy else 1.0)
        click.echo(f"{name:20} {summary(rollouts)}  {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
