"""AdamW for the policy gradient, with clipping, warm-up and a rate of its own for the embedding.

The embedding has its own learning-rate scale: Hugging Face shapes feed embedding rows into the residual stream as is,
so they start about sqrt(width)/2 times larger than a head's rows would, and Adam, whose steps do not depend on the
gradient's size, would move them that much too slowly. With the scale the parametrisation equals "small embedding,
multiplied by the scale on input", which is what was seen to learn.

The rule is written out here because `torch.optim.AdamW` imports the compiler stack with its first instance (seen with
torch 2.15: 4 to 9 s and 160 MB in a process that needs neither), and because a checkpoint wants its state by
parameter name. A test holds it equal to `torch.optim.AdamW`.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor

from odradek.actors.policy.model import Policy
from odradek.actors.trainer.errors import CheckpointError

FIRST: Final = "exp_avg."
SECOND: Final = "exp_avg_sq."
"""Prefixes of the optimiser's tensors in a checkpoint; the rest of the name is the parameter's."""


class OptimiserSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """AdamW with gradient clipping and a linear warm-up, the rates seen to learn in the demo."""

    learning_rate: float = 6e-4
    """Too low learns nothing in 70 steps; 1.5e-3 was seen to make behaviour swing until edits vanish."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.5
    """Largest global gradient norm of one optimiser step."""
    warmup_steps: int = 4
    """Training steps (not minibatches) over which the rate rises from 1/warmup to 1. 0 starts at the full rate: the
    first second-moment estimates are then from a single batch."""
    embedding_lr_scale: float = 1.0
    """Factor on the rate of the embedding; its inverse is applied to the final norm. sqrt(hidden_size)/2 for a policy
    that was initialised by `Policy` (5.66 for the demo); 1 for foreign checkpoints."""

    def rate(self, step: int) -> float:
        """Learning rate of training step `step` (the first is 1)."""
        return self.learning_rate * min(1.0, step / self.warmup_steps if self.warmup_steps else 1.0)


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) on every parameter of a policy."""

    def __init__(self, policy: Policy) -> None:
        self.updates = 0
        """Optimiser steps taken: Adam's bias correction depends on it."""
        named = dict(policy.named_parameters())
        self._names, self._params = list(named), list(named.values())
        self._first = [torch.zeros_like(p) for p in self._params]
        self._second = [torch.zeros_like(p) for p in self._params]

    def zero_grad(self) -> None:
        for p in self._params:
            p.grad = None

    @torch.no_grad()
    def step(self, s: OptimiserSettings, rate: float) -> None:
        """One update at learning rate `rate` (times each parameter's scale); a parameter without gradient has 0."""
        self.updates += 1
        scales = {"embed": s.embedding_lr_scale, "final_norm": 1 / s.embedding_lr_scale}
        correction1 = 1 - s.beta1**self.updates
        correction2 = 1 - s.beta2**self.updates
        for name, p, first, second in zip(self._names, self._params, self._first, self._second, strict=True):
            scale = scales.get(name, 1.0)
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.mul_(1 - rate * scale * s.weight_decay)
            first.lerp_(grad, 1 - s.beta1)
            second.mul_(s.beta2).addcmul_(grad, grad, value=1 - s.beta2)
            denominator = (second.sqrt() / correction2**0.5).add_(s.eps)
            p.addcdiv_(first, denominator, value=-rate * scale / correction1)

    def state_tensors(self) -> dict[str, Tensor]:
        """Copies of the moments by parameter name, for a checkpoint (with `updates`)."""
        moments = ((FIRST, self._first), (SECOND, self._second))
        return {p + name: t.clone() for p, all_ in moments for name, t in zip(self._names, all_, strict=True)}

    def load_state_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Take up the moments of a checkpoint; refuses tensors that are not exactly those of this policy."""
        targets = {FIRST + n: t for n, t in zip(self._names, self._first, strict=True)}
        targets |= {SECOND + n: t for n, t in zip(self._names, self._second, strict=True)}
        odd = sorted(set(targets) ^ set(tensors)) or [n for n in targets if targets[n].shape != tensors[n].shape]
        if odd:
            raise CheckpointError(f"optimiser state does not fit this policy: {odd[0]} ({len(odd)} tensors in all)")
        for name, target in targets.items():
            target.copy_(tensors[name])
        self.updates = updates
