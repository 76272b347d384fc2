"""The objective: a clipped token-level policy gradient, as per-token losses and per-token weights.

    loss = sum over trained tokens t of  w_t * c_t * surrogate(lp_t - anchor_t, A_t)  [+ w_t * kl * k3(lp_ref_t - lp_t)]

`w_t` (`token_weights`) depends on the masks and lengths of the whole minibatch only, never on how it is cut: summing
over micro-batches and over ranks gives the same gradient up to rounding. Weights are 0 outside the mask and no division
happens when nothing is trained, so an empty batch has loss 0, not 0/0.

One anchor, never both corrections at once:
- `behaviour`: anchor = the sampler's log-prob, c = 1. One ratio corrects for staleness and for the minibatches alike.
- `proximal`: anchor = the log-prob under the step's first weights; c = min(C, exp(lp_start - lp_sampler)), detached.

`PRESETS` gives the published algorithms: Dr. GRPO (Liu et al. 2025, constant normaliser: no length bias), GRPO (Shao et
al. 2024, mean in each sequence), DAPO (Yu et al. 2025, mean over all tokens, higher upper clip), GSPO (Zheng et al.
2025, one ratio a sequence: of a condensed session, one a segment), CISPO (MiniMax 2025, clipped weight, gradient of
every token), RLOO (Ahmadian et al. 2024, plain policy gradient of the sequence). Their advantages are the assembler's
matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from odradek.actors.trainer.batch import TrainingBatch

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are held within this before exp: a sampler's log-prob of -40 must not become an infinite ratio. Any clip
acts long before; only the unclipped side of a hugely unlikely token is touched."""


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy-gradient objective; the defaults are Dr. GRPO with the demo's clip range."""

    surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    aggregation: Literal["constant", "sequence_mean", "token_mean"] = "constant"
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    clip_low: float = 0.2
    """The ratio's gradient vanishes below 1 - clip_low (for a negative advantage)."""
    clip_high: float = 0.28
    """The ratio's gradient vanishes above 1 + clip_high. Higher than clip_low keeps rare good tokens growing."""
    constant_tokens: float = 100.0
    """`constant` divides by (sequences * this): a typical number of sampled tokens, so that losses read like means.
    With Adam its size hardly matters; that it does not depend on the sequence does."""
    proximal_cap: float = 2.0
    """C of the proximal anchor: largest weight of a token that the step's first weights like more than the sampler."""
    kl_coefficient: float = 0.0
    """Weight of the k3 estimate of KL(policy, reference); needs reference log-probs. 0 computes none."""


PRESETS: Final[dict[str, ObjectiveSettings]] = {
    "dr_grpo": ObjectiveSettings(),
    "grpo": ObjectiveSettings(aggregation="sequence_mean", clip_high=0.2),
    "dapo": ObjectiveSettings(aggregation="token_mean"),
    "gspo": ObjectiveSettings(surrogate="gspo", aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": ObjectiveSettings(surrogate="cispo", aggregation="token_mean"),
    "rloo": ObjectiveSettings(surrogate="reinforce", constant_tokens=1.0),
}


def token_weights(batch: TrainingBatch, settings: ObjectiveSettings) -> NDArray[np.float32]:
    """`w` `[T]` of one minibatch: 0 on untrained tokens. Sessions without a trained token count nowhere; the segments
    of one session count once, as if they were one sequence."""
    session = batch.session_of_sequence()
    per_session = np.bincount(session, batch.trained_tokens()).astype(np.int64)
    total, sessions = int(per_session.sum()), int((per_session > 0).sum())
    if total == 0:
        return np.zeros(len(batch.tokens), np.float32)
    if settings.aggregation == "token_mean":
        weight = np.full(batch.sequences, 1.0 / total)
    elif settings.aggregation == "sequence_mean":
        weight = 1.0 / (np.maximum(per_session, 1) * sessions)[session]
    else:
        weight = np.full(batch.sequences, 1.0 / (sessions * settings.constant_tokens))
    return np.where(batch.loss_mask, weight[batch.sequence_of_token()], 0.0).astype(np.float32)


@dataclass(frozen=True)
class TokenInputs:
    """What the objective reads of N trained tokens; every tensor `[N]`."""

    logprob: Tensor
    """Under the weights being trained; carries the gradient."""
    sampler: Tensor
    start: Tensor | None
    """Under the step's first weights; the `proximal` anchor only."""
    reference: Tensor | None
    advantage: Tensor
    weight: Tensor
    sequence: Tensor
    """Sequence index of each token, int64 ascending: GSPO's ratio is one a sequence."""


@dataclass(frozen=True)
class TokenLoss:
    """`loss` is a scalar with gradient; the rest is detached, `[N]`, for metrics."""

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    kl: Tensor


def policy_loss(x: TokenInputs, settings: ObjectiveSettings) -> TokenLoss:
    """Sum of weighted token losses of a micro-batch."""
    anchor, correction = x.sampler, torch.ones_like(x.sampler)
    if settings.anchor == "proximal":
        if x.start is None:
            raise ValueError("the proximal anchor needs the log-probs under the step's first weights")
        anchor = x.start
        correction = (
            (x.start - x.sampler).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=settings.proximal_cap)
        )
    log_ratio = (x.logprob - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    per_token, clipped = _surrogate(x, log_ratio, settings)
    loss = (x.weight * correction * per_token).sum()
    kl = torch.zeros_like(x.sampler)
    if settings.kl_coefficient:
        if x.reference is None:
            raise ValueError("a KL coefficient needs reference log-probs")
        behind = (x.reference - x.logprob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = behind.exp() - 1 - behind
        loss = loss + settings.kl_coefficient * (x.weight * kl).sum()
    return TokenLoss(loss, log_ratio.detach(), clipped.detach(), kl.detach())


def _surrogate(x: TokenInputs, log_ratio: Tensor, s: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """Loss of each token, and which tokens the clip has taken out (gradient 0, or a capped weight for CISPO)."""
    if s.surrogate == "reinforce":
        return -x.advantage * x.logprob, torch.zeros_like(x.logprob, dtype=torch.bool)
    if s.surrogate == "gspo":
        log_ratio = _sequence_mean(log_ratio, x.sequence)
    ratio = log_ratio.exp()
    if s.surrogate == "cispo":
        capped = ratio.detach().clamp(max=1 + s.clip_high)
        return -capped * x.advantage * x.logprob, ratio > 1 + s.clip_high
    held = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    free, bound = ratio * x.advantage, held * x.advantage
    return -torch.minimum(free, bound), bound < free


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Each token's value replaced by the mean over its sequence's trained tokens."""
    _, at, count = torch.unique(sequence, return_inverse=True, return_counts=True)
    mean: Tensor = values.new_zeros(len(count)).index_add(0, at, values) / count
    return mean[at]
