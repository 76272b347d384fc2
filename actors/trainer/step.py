"""One training step: minibatches of packed micro-batches, accumulated, clipped, applied.

Guarantees:
- the gradient of a minibatch does not depend on how it is cut into micro-batches or shared between ranks, up to
  rounding: weights are normalised over the whole minibatch and summed;
- sequences without a trained token take part in nothing: the step equals the step without them, and a batch without any
  leaves weights and optimiser untouched with a finite zero loss;
- a loss or gradient that is not finite raises `DivergedError` before it reaches a weight.

Over several ranks each holds the whole batch (it is small beside the activations) and trains its share; gradients and
metrics are summed by `all_reduce`, so all ranks apply the same update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.model import Policy, Routing
from odradek.actors.trainer.batch import TrainingBatch, cut
from odradek.actors.trainer.errors import DivergedError
from odradek.actors.trainer.objective import ObjectiveSettings, TokenInputs, policy_loss, token_weights
from odradek.actors.trainer.optim import AdamW, OptimiserSettings
from odradek.kernels.logprob.api import token_logprobs


class StepSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a batch is turned into optimiser steps."""

    objective: ObjectiveSettings = ObjectiveSettings()
    optimiser: OptimiserSettings = OptimiserSettings()
    minibatches: int = 2
    """Optimiser steps a batch. 1 is strictly on-policy; many go beyond what the clip can hold."""
    micro_tokens: int = 8_192
    """Tokens of one forward and backward: bounds memory only, never the result."""
    router_replay: bool = True
    """A mixture of experts is trained through the experts that sampled (Ma et al. 2025, "rollout routing replay"), not
    those that the weights being trained would choose: else a token's ratio compares two different networks. The mixing
    weights, and so the router's gradient, are of the weights being trained."""


class StepReport(msgspec.Struct, frozen=True):
    """What one step did; means are over trained tokens of all minibatches and ranks."""

    step: int
    learning_rate: float
    optimiser_steps: int
    """Minibatches applied; 0 when nothing was trained."""
    sequences: int
    """That took part; the segments of one session are one."""
    trained_tokens: int
    loss: float = 0.0
    gradient_norm: float = 0.0
    """Largest of the minibatches, before clipping."""
    clip_fraction: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    """k3 estimate of KL between anchor and trained weights: mean of r - 1 - log r."""
    reference_kl: float = 0.0
    ratio_mean: float = 0.0
    ratio_max: float = 0.0
    gap_mean: float = 0.0
    """Mean |log-prob under the step's first weights - sampler's| over the first minibatch, staleness included."""
    gap_max: float = 0.0
    fresh_tokens: int = 0
    """Tokens of the first minibatch that were sampled under the very weights that the step began with."""
    fresh_gap_max: float = 0.0
    """Largest gap among those: exactly 0 where sampler and trainer share a numerics_id."""

    def metrics(self) -> dict[str, float]:
        """Every field as a number, for `step.completed`."""
        return {name: float(value) for name, value in msgspec.structs.asdict(self).items()}


@dataclass
class _Sums:
    """Sums over trained tokens (`total`) and maxima (`top`), joined over ranks before they are divided."""

    total: dict[str, float] = field(default_factory=dict)
    top: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.total[name] = self.total.get(name, 0.0) + value

    def peak(self, name: str, value: float) -> None:
        self.top[name] = max(self.top.get(name, 0.0), value)


def score(policy: Policy, batch: TrainingBatch, micro_tokens: int = 8_192) -> NDArray[np.float32]:
    """Log-probs `[T]` of every token under `policy`, 0 for the first of a sequence. No gradient.

    Under the weights and numerics that sampled a token this equals its `sampler_logprobs` bit for bit.
    """
    out = np.zeros(len(batch.tokens), np.float32)
    for run in cut(batch.lengths().tolist(), micro_tokens):
        part = batch.select(run)
        at = np.setdiff1d(np.arange(len(part.tokens)), part.seq_starts[:-1])
        with torch.no_grad():
            logprob, _ = _logprobs(policy, part, torch.from_numpy(at))
        out[batch.indices(run)[at]] = logprob.numpy()
    return out


def train_step(
    policy: Policy,
    optimiser: AdamW,
    batch: TrainingBatch,
    settings: StepSettings,
    rng: torch.Generator,
    *,
    step: int,
    reference: NDArray[np.float32] | None = None,
    group: dist.ProcessGroup | None = None,
) -> StepReport:
    """Train `batch` in place as training step `step` (1 is the first) and report.

    `rng` orders the sequences into minibatches and is advanced, the same on every rank. `reference` `[T]` are the
    reference policy's log-probs, needed for a KL term. `group` is a process group of ranks that call this together.
    """
    if not settings.router_replay:
        batch = replace(batch, experts=None)
    # Whole sessions are drawn, so that the segments of one meet in one minibatch; and the draw must not depend on
    # sequences that take no part.
    session = batch.session_of_sequence()
    taking_part = batch.trained_tokens() > 0
    trained = np.unique(session[taking_part])
    order = [int(trained[i]) for i in torch.randperm(len(trained), generator=rng)]
    start = score(policy, batch, settings.micro_tokens) if settings.objective.anchor == "proximal" and order else None
    sums, applied = _Sums(), 0
    for n in range(settings.minibatches):
        chosen = np.flatnonzero(taking_part & np.isin(session, order[n :: settings.minibatches])).tolist()
        if not chosen:
            continue
        optimiser.zero_grad()
        weight = np.zeros(len(batch.tokens), np.float32)
        weight[batch.indices(chosen)] = token_weights(batch.select(chosen), settings.objective)
        minibatch = _Minibatch(batch, weight, settings.objective, start, reference)
        for part in _my_share(batch, chosen, settings.micro_tokens, group):
            _accumulate(policy, minibatch, part, sums, fresh=step - 1 if applied == 0 else None)
        _apply(policy, optimiser, settings.optimiser, step, sums, group)
        applied += 1
    optimiser.zero_grad()
    return _report(sums, group, step=step, rate=settings.optimiser.rate(step), applied=applied, sequences=len(order))


@dataclass(frozen=True)
class _Minibatch:
    """A batch with the token weights of one minibatch, normalised over all of it."""

    batch: TrainingBatch
    weight: NDArray[np.float32]
    """`[T]`, 0 outside the minibatch."""
    objective: ObjectiveSettings
    start: NDArray[np.float32] | None
    reference: NDArray[np.float32] | None


def _my_share(
    batch: TrainingBatch, chosen: Sequence[int], micro_tokens: int, group: dist.ProcessGroup | None
) -> list[list[int]]:
    """This rank's micro-batches of the chosen sequences: whole sequences, dealt out in turn."""
    rank, world = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    mine = list(chosen)[rank::world]
    lengths = batch.lengths()
    return [[mine[i] for i in run] for run in cut([int(lengths[s]) for s in mine], micro_tokens)]


def _accumulate(
    policy: Policy, minibatch: _Minibatch, sequences: Sequence[int], sums: _Sums, *, fresh: int | None
) -> None:
    """Forward and backward of one micro-batch; gradients add up in the parameters.

    `fresh` is the version of the weights while no minibatch has been applied yet: then the gap to the sampler is taken.
    """
    part = minibatch.batch.select(sequences)
    at = np.flatnonzero(part.loss_mask)
    logprob, entropy = _logprobs(policy, part, torch.from_numpy(at))
    there = minibatch.batch.indices(sequences)[at]

    def of(values: NDArray[np.float32] | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[there])

    inputs = TokenInputs(
        logprob=logprob,
        sampler=torch.from_numpy(part.sampler_logprobs[at]),
        start=of(minibatch.start),
        reference=of(minibatch.reference),
        advantage=torch.from_numpy(part.advantages[at]),
        weight=torch.from_numpy(minibatch.weight[there]),
        sequence=torch.from_numpy(part.sequence_of_token()[at]),
    )
    out = policy_loss(inputs, minibatch.objective)
    out.loss.backward()  # type: ignore[no-untyped-call]
    ratio = out.log_ratio.exp()
    sums.add("loss", float(out.loss.detach()))
    sums.add("tokens", len(at))
    sums.add("clip_fraction", float(out.clipped.sum()))
    sums.add("entropy", float(entropy.detach().sum()))
    sums.add("approx_kl", float((ratio - 1 - out.log_ratio).sum()))
    sums.add("reference_kl", float(out.kl.sum()))
    sums.add("ratio_mean", float(ratio.sum()))
    sums.peak("ratio_max", float(ratio.max()))
    if fresh is not None:
        gap = (logprob.detach() - inputs.sampler).abs()
        same = torch.from_numpy(part.versions[at] == fresh)
        sums.add("gap_tokens", len(at))
        sums.add("gap_mean", float(gap.sum()))
        sums.peak("gap_max", float(gap.max()))
        sums.add("fresh_tokens", int(same.sum()))
        sums.peak("fresh_gap_max", float(gap[same].max()) if same.any() else 0.0)


def _logprobs(policy: Policy, batch: TrainingBatch, at: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy `[N]` of the tokens at `at`, each from the hidden state of the token before it."""
    tokens = torch.from_numpy(batch.tokens).long()
    positions, starts = torch.from_numpy(batch.positions).long(), torch.from_numpy(batch.seq_starts)
    hidden = policy.forward_packed(tokens, positions, starts, replayed(policy.config, batch))
    return token_logprobs(hidden[at - 1], policy.head_weight, tokens[at])


def replayed(config: ModelConfig, batch: TrainingBatch) -> Routing | None:
    """The sampler's choice of experts for every token; None for a dense policy, and where it is not known of all.

    The last token of a sequence was never computed by the sampler. Nothing comes after it: any choice will do.
    """
    if not config.num_experts or batch.experts is None:
        return None
    shape = (config.num_hidden_layers, config.num_experts_per_tok)
    last = np.broadcast_to(np.arange(shape[1], dtype="<i2"), (1, *shape))
    parts = []
    for logged, length in zip(batch.experts, batch.lengths().tolist(), strict=True):
        if len(logged) != (length - 1) * shape[0] * shape[1] * last.itemsize:
            return None
        ids = np.frombuffer(logged, last.dtype)
        if not ((ids >= 0) & (ids < config.num_experts)).all():
            return None
        parts += [ids.reshape(-1, *shape), last]
    ids_T_L_K = torch.from_numpy(np.concatenate(parts).astype(np.int32))
    return Routing(replay=[layer.contiguous() for layer in ids_T_L_K.unbind(1)])


def _apply(
    policy: Policy,
    optimiser: AdamW,
    settings: OptimiserSettings,
    step: int,
    sums: _Sums,
    group: dist.ProcessGroup | None,
) -> None:
    """Sum gradients over ranks, clip, and take one optimiser step."""
    if group is not None:
        for p in policy.parameters():
            if p.grad is None:  # this rank had no sequence of the minibatch
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), settings.clip_norm))
    if not np.isfinite(norm):
        raise DivergedError(f"the gradient norm of step {step} is {norm}; reload the parent and look at its batch")
    sums.peak("gradient_norm", norm)
    optimiser.step(settings, settings.rate(step))


def _report(
    sums: _Sums, group: dist.ProcessGroup | None, *, step: int, rate: float, applied: int, sequences: int
) -> StepReport:
    total, top = _joined(sums, group)
    tokens = total.pop("tokens", 0.0)
    gap_tokens = total.pop("gap_tokens", 0.0)
    loss = total.pop("loss", 0.0) / max(1, applied)
    gap = total.pop("gap_mean", 0.0) / max(1.0, gap_tokens)
    fresh = int(total.pop("fresh_tokens", 0.0))
    means = {name: value / max(1.0, tokens) for name, value in total.items()}
    return StepReport(
        step=step,
        learning_rate=rate,
        optimiser_steps=applied,
        sequences=sequences,
        trained_tokens=int(tokens),
        loss=loss,
        gap_mean=gap,
        fresh_tokens=fresh,
        **means,
        **top,
    )


_SUMS = (
    "loss",
    "tokens",
    "clip_fraction",
    "entropy",
    "approx_kl",
    "reference_kl",
    "ratio_mean",
    "gap_tokens",
    "gap_mean",
    "fresh_tokens",
)
_PEAKS = ("ratio_max", "gap_max", "fresh_gap_max", "gradient_norm")


def _joined(sums: _Sums, group: dist.ProcessGroup | None) -> tuple[dict[str, float], dict[str, float]]:
    total = torch.tensor([sums.total.get(name, 0.0) for name in _SUMS], dtype=torch.float64)
    top = torch.tensor([sums.top.get(name, 0.0) for name in _PEAKS], dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(_SUMS, total.tolist(), strict=True)), dict(zip(_PEAKS, top.tolist(), strict=True))
