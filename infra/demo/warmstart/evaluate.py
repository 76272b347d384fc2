"""Solve rates of a policy in one process: `python -m odradek.infra.demo.warmstart.evaluate [DIR]`.

Prints first the loss on demonstrations that no training saw, with the load of a mixture's experts. Then samples each
held-out set at temperature 1 (`--greedy`: temperature 0) and prints rates with 95 % intervals and what the agent did.
Held-out tasks only; a set's tasks are the same at each call.
"""

from __future__ import annotations

import random
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
from odradek.actors.policy.template import XmlTemplate
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH, template_of, training_stream
from odradek.infra.demo.family.sets import EVALUATION_SETS, TaskSet, tasks
from odradek.infra.demo.intervals import wilson
from odradek.infra.demo.warmstart.batches import PAD, RouterLoad, pool_batches, target_nll
from odradek.infra.demo.warmstart.rollouts import Rollout, rate, run_sessions
from odradek.kernels.numerics import numerics_id

TASK_SEED = 1
"""Seed of the evaluated tasks; the demo evaluates others."""


HELD_OUT_SEED = 1_000_003
"""Seed of the demonstrations that the loss is taken on; warm starts train on other seeds."""

HELD_OUT_BATCH = 7_200
"""Tokens a forward of those: bounds memory only."""


@torch.no_grad()
def held_out_loss(policy: Policy, template: XmlTemplate, pools: int = 1) -> str:
    """One line: mean loss of the agent's tokens and of all others, and the load of the experts."""
    nll, count = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    shares: list[torch.Tensor] = []
    stream, rng = training_stream(HELD_OUT_SEED, template=template), random.Random(HELD_OUT_SEED)
    for _ in range(pools):
        for batch in pool_batches(stream, HELD_OUT_BATCH, policy.config.max_position_embeddings, rng):
            load = RouterLoad(batch.ids_BW[:, :-1].flatten() != PAD)
            of_token = target_nll(policy, batch.ids_BW, load.ops).double()
            agent = batch.agent_BW[:, 1:]
            for at, which in enumerate((agent, (batch.ids_BW[:, 1:] != PAD) & ~agent)):
                nll[at] += of_token[which].sum()
                count[at] += which.sum()
            shares.append(torch.stack(load.shares) if load.shares else torch.empty(0))
    mean = nll / count
    line = f"agent nll {mean[0]:.4f} over {int(count[0])} tokens, others {mean[1]:.4f} over {int(count[1])}"
    if not shares[0].numel():
        return line
    layers = torch.stack(shares).mean(0)
    return f"{line}; load of experts by layer " + ", ".join("/".join(f"{100 * s:.0f}" for s in row) for row in layers)


def engine_for(policy: Policy) -> Engine:
    """An engine that serves `policy` as version 0."""
    engine = Engine(policy.config, numerics_id())
    engine.install(build(policy.config, 0, to_hf_state(policy)))
    return engine


def evaluate(
    policy: Policy, template: XmlTemplate, name: TaskSet, count: int, temperature: float = 1.0
) -> list[Rollout]:
    """One session for each of `count` tasks of a set."""
    chosen = [(task, 1000 + i) for i, task in enumerate(tasks(name, TASK_SEED, count))]
    return run_sessions(engine_for(policy), template, chosen, temperature)


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
@click.option("--count", type=int, default=120, show_default=True, help="Tasks of each set; 0 takes the loss only.")
@click.option("--pools", type=int, default=1, show_default=True, help="Pools of held-out demonstrations for the loss.")
@click.option("--greedy", is_flag=True, help="Take the most probable token.")
@click.option("--set", "sets", type=click.Choice(get_args(TaskSet)), multiple=True, help="Only this set (repeatable).")
def main(directory: Path, count: int, pools: int, greedy: bool, sets: tuple[TaskSet, ...]) -> None:
    torch.set_num_threads(1)
    policy, template = Policy.load_hf(directory), template_of(directory)
    click.echo(f"{'held-out loss':20} {held_out_loss(policy, template, pools)}")
    for name in (sets or EVALUATION_SETS) if count else ():
        begun = time.monotonic()
        rollouts = evaluate(policy, template, name, count, 0.0 if greedy else 1.0)
        click.echo(f"{name:20} {summary(rollouts)}  {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
