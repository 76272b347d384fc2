"""Train the warm start: `python -m odradek.infra.demo.warmstart.train --tokens 5.5e6 --seed 0 --out DIR`.

`--from DENSE --experts 4` makes a mixture of experts out of a trained dense policy instead (`upcycle.py`) and trains it
on at a lower, falling rate. `--from` alone trains the policy on: what to compare with, and how an imported one
(`odradek policy import`) gets to know our template. DIR becomes a policy directory (`policy.dir`).

Deterministic on one host: demonstrations, their order and the weights follow from the seed. The schedule counts tokens,
never time, so a busy machine trains the same policy more slowly. Progress goes to stdout about every 20 s; every few
minutes the whole state is saved beside the weights, and the same command goes on from there after an interruption.
`--snapshot 1.5e6` also writes `DIR/at-1.5M`, so that others can try an early policy.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click
import msgspec
import torch
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.model import Policy
from odradek.infra.cluster.policy import TRAINING_BYTES
from odradek.infra.demo.demonstrations.segments import Example
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH, shipped_template, template_of, training_stream
from odradek.infra.demo.warmstart.batches import PAD, POOL, Batch, RouterLoad, pool_batches, target_nll
from odradek.infra.demo.warmstart.muon import set_rate, warm_start_optimisers
from odradek.infra.demo.warmstart.upcycle import upcycled

MUON_RATE: Final = 0.02
"""Rate of the block matrices: their update is orthogonal, so this is the step in units of spectral norm."""
ADAMW_RATE: Final = 3e-3
"""Rate of embedding (before its scale), norms and routers."""
BATCH_TOKENS: Final = 3_600
"""Tokens a batch: larger batches make too few steps out of the same tokens."""
CONSTANT_SHARE: Final = 0.4
"""Share of the run at full rate before it falls linearly to zero."""
FLOOR: Final = 0.03
"""Smallest factor on the rate."""
WARMUP_STEPS: Final = 30
"""Steps of rising rate: Muon from random weights diverges without."""
CONTINUED_WARMUP: Final = 5
"""The same from trained weights."""
CONTINUED_RATE: Final = 0.25
"""Factor on both rates for a policy that is trained already, unless told otherwise. Too high forgets before it learns,
too low leaves upcycled experts alike."""
BALANCE: Final = 0.01
"""Weight of the routers' balancing term, the usual one. Too low may starve an expert, too high routes by lot."""
CLIP_NORM: Final = 1.0
"""Gradient norm: only the first hundreds of steps ever reach it."""
REPORT_SECONDS: Final = 20.0
"""Between progress lines."""
SAVE_SECONDS: Final = 180.0
"""Between saved states: an interruption loses at most this much and one pool."""
STATE_FILE: Final = "training-state.pt"


def rate_factor(step: int, tokens: int, total: int, continued: float | None = None) -> float:
    """Factor on both rates at `step` (from 0) with `tokens` seen of `total`; a run that continues at the factor
    `continued` falls from the start."""
    share, constant = tokens / total, CONSTANT_SHARE if continued is None else 0.0
    falling = 1.0 if share < constant else max(FLOOR, (1 - share) / (1 - constant))
    warmup = WARMUP_STEPS if continued is None else CONTINUED_WARMUP
    return min(1.0, (step + 1) / warmup) * falling * (1.0 if continued is None else continued)


class Totals(msgspec.Struct):
    """Sums since the last progress line."""

    tokens: int = 0
    loss: float = 0.0
    batches: int = 0
    agent_nll: float = 0.0
    agent_tokens: int = 0


class WarmStart:
    """A run: policy, optimisers and place in the stream, saved and resumed between pools of demonstrations."""

    def __init__(self, policy: Policy, total_tokens: int, seed: int, continued: float | None = None) -> None:
        self.policy, self.total_tokens, self.seed, self.continued = policy, total_tokens, seed, continued
        self.batch_tokens = min(BATCH_TOKENS, TRAINING_BYTES // policy.config.training_bytes_per_token)
        self.muon, self.adamw = warm_start_optimisers(policy, MUON_RATE, ADAMW_RATE)
        self.step = self.tokens = self.pools = 0
        self.totals = Totals()

    @property
    def done(self) -> bool:
        return self.tokens >= self.total_tokens

    def train_pool(self, stream: Iterator[Example], after_batch: Callable[[], None]) -> None:
        """Train on the next pool of demonstrations."""
        rng = random.Random(f"warm-start/{self.seed}/{self.pools}")
        for batch in pool_batches(stream, self.batch_tokens, self.policy.config.max_position_embeddings, rng):
            if not self.done:
                self._train(batch)
                after_batch()
        self.pools += 1

    def _train(self, batch: Batch) -> None:
        factor = rate_factor(self.step, self.tokens, self.total_tokens, self.continued)
        set_rate(self.muon, MUON_RATE * factor)
        set_rate(self.adamw, ADAMW_RATE * factor)
        load = RouterLoad(batch.ids_BW[:, :-1].flatten() != PAD)
        nll = target_nll(self.policy, batch.ids_BW, load.ops)
        weight = batch.weight_BW[:, 1:]
        loss = (nll * weight).sum() / weight.sum()
        (loss + BALANCE * load.loss).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), CLIP_NORM)
        for optimiser in (self.muon, self.adamw):
            optimiser.step()
            optimiser.zero_grad()
        self.step += 1
        self.tokens += batch.tokens
        self._count(batch, nll.detach(), float(loss.detach()))

    def _count(self, batch: Batch, nll: Tensor, loss: float) -> None:
        agent = batch.agent_BW[:, 1:]
        t = self.totals
        t.tokens += batch.tokens
        t.loss += loss
        t.batches += 1
        t.agent_nll += float(nll[agent].sum())
        t.agent_tokens += int(agent.sum())

    def state(self) -> dict[str, Any]:
        return {
            "policy": self.policy.state_dict(),
            "muon": self.muon.state_dict(),
            "adamw": self.adamw.state_dict(),
            "place": [self.step, self.tokens, self.pools],
            "run": [self.total_tokens, self.seed],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["run"] != [self.total_tokens, self.seed]:
            raise click.ClickException(
                f"the saved state is of tokens, seed {state['run']}, asked for {[self.total_tokens, self.seed]}; "
                "use another --out"
            )
        self.policy.load_state_dict(state["policy"])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        self.step, self.tokens, self.pools = state["place"]


class Reporter:
    """Prints one progress line about every `REPORT_SECONDS`."""

    def __init__(self, run: WarmStart) -> None:
        self._run = run
        self._started = self._last = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._last < REPORT_SECONDS:
            return
        run, t = self._run, self._run.totals
        click.echo(
            f"{now - self._started:.0f}s  step {run.step}"
            f"  {run.tokens / 1e6:.2f}M of {run.total_tokens / 1e6:.2f}M tokens"
            f"  {t.tokens / (now - self._last):.0f} tokens/s  loss {t.loss / t.batches:.3f}"
            f"  agent nll {t.agent_nll / max(1, t.agent_tokens):.3f}"
        )
        run.totals, self._last = Totals(), now


@click.command(help="Train the demo policy on generated demonstrations.")
@click.option("--tokens", type=float, default=5.5e6, show_default=True, help="Tokens to train on.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Where the weights go.")
@click.option("--snapshot", type=float, multiple=True, help="Also write the weights at this many tokens (repeatable).")
@click.option("--experts", type=int, default=0, show_default=True, help="Experts a layer, 2 chosen; 0 is dense.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Train this dense policy on; with --experts, as a mixture whose experts begin as its feed-forward.",
)
@click.option("--rate", type=float, default=CONTINUED_RATE, show_default=True, help="Factor on the rates with --from.")
def main(
    tokens: float, seed: int, out: Path, snapshot: tuple[float, ...], experts: int, source: Path | None, rate: float
) -> None:
    torch.set_num_threads(1)
    run = WarmStart(_first(source, experts, seed), int(tokens), seed, continued=None if source is None else rate)
    tokenizer = (source or TOKENIZER_PATH.parent) / TOKENIZER_PATH.name
    out.mkdir(parents=True, exist_ok=True)
    if (out / STATE_FILE).exists():
        run.restore(torch.load(out / STATE_FILE, weights_only=True))
        click.echo(f"going on from {run.tokens / 1e6:.2f}M tokens")
    click.echo(f"{sum(p.numel() for p in run.policy.parameters())} parameters")
    progress = (lambda: run.tokens / run.total_tokens) if run.continued is None else lambda: 1.0
    stream = training_stream(seed, progress, run.pools * POOL, template=template_of(tokenizer.parent))
    _train(run, stream, out, sorted(int(s) for s in snapshot if s > run.tokens))
    run.policy.save_hf(out)
    shutil.copyfile(tokenizer, out / tokenizer.name)
    click.echo(f"done: {run.tokens} tokens, {run.step} steps; weights in {out}")


def _first(source: Path | None, experts: int, seed: int) -> Policy:
    if source is None:
        config = ModelConfig(vocab_size=shipped_template().tokenizer.vocab_size, num_experts=experts)
        scale = math.sqrt(config.hidden_size) / 2  # what `Policy` initialises asks for, see `trainer.optim`
        return Policy(msgspec.structs.replace(config, embedding_lr_scale=scale), seed)
    policy = Policy.load_hf(source)
    return upcycled(policy, experts, seed) if experts else policy


def _train(run: WarmStart, stream: Iterator[Example], out: Path, snapshots: list[int]) -> None:
    reporter, saved = Reporter(run), time.monotonic()
    while not run.done:
        run.train_pool(stream, reporter.tick)
        while snapshots and run.tokens >= snapshots[0]:
            run.policy.save_hf(out / f"at-{snapshots.pop(0) / 1e6:g}M")
        if time.monotonic() - saved > SAVE_SECONDS or run.done:
            _save(run, out)
            saved = time.monotonic()


def _save(run: WarmStart, out: Path) -> None:
    torch.save(run.state(), out / f"{STATE_FILE}.new")
    (out / f"{STATE_FILE}.new").replace(out / STATE_FILE)  # a kill in between leaves the old state whole
    run.policy.save_hf(out / "latest")


if __name__ == "__main__":
    main()
