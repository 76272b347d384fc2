"""Optimisers: AdamW for the policy gradient, Muon for the supervised warm start.

Owns which parameters get which rule and rate. The embedding has its own learning-rate scale: Hugging Face shapes feed
embedding rows into the residual stream unscaled, so they start about sqrt(width)/2 times larger than a head's rows
would, and Adam, whose steps do not depend on the gradient's size, would move them that much too slowly. With the scale
the parametrisation equals "small embedding, multiplied by the scale on input", which is what was seen to learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from odradek.actors.policy.model import Policy

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
"""Quintic iteration of Muon (Jordan et al. 2024): pushes all singular values towards 1 in five rounds."""

NEWTON_SCHULZ_ROUNDS: Final = 5
"""Fewer leaves small directions unscaled, more only costs time."""


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


def adamw(policy: Policy, settings: OptimiserSettings) -> torch.optim.AdamW:
    """AdamW over three groups: embedding, final norm, everything else."""
    return torch.optim.AdamW(
        _scaled_groups(policy, lambda _: True, settings.learning_rate, settings.embedding_lr_scale),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        foreach=True,
    )


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set each group to `rate` times its own scale."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


def warm_start_optimisers(
    policy: Policy, embedding_lr_scale: float, muon_rate: float = 0.02, adamw_rate: float = 3e-3
) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the matrices inside the blocks, AdamW on embedding, norms and routers."""

    def is_matrix(name: str) -> bool:
        return name.startswith("blocks.") and name.endswith((".qkv", ".o", ".w13", ".w2"))

    matrices = [p for name, p in policy.named_parameters() if is_matrix(name)]
    rest = _scaled_groups(policy, lambda name: not is_matrix(name), adamw_rate, embedding_lr_scale)
    return Muon(matrices, muon_rate), torch.optim.AdamW(rest, adamw_rate, betas=(0.9, 0.95), weight_decay=0.0)


def _scaled_groups(policy: Policy, want: Callable[[str], bool], rate: float, scale: float) -> list[dict[str, Any]]:
    scales = {"embed": scale, "final_norm": 1 / scale}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in policy.named_parameters():
        if want(name):
            groups.setdefault(scales.get(name, 1.0), []).append(p)
    return [{"params": params, "lr": rate * s, "scale": s} for s, params in groups.items()]


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised: every direction of a matrix moves equally far (Jordan et al. 2024)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: nn.Parameter, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum: Tensor = state["momentum"].lerp_(grad, 1 - group["momentum"])
        direction = orthogonalise(grad.lerp(momentum, group["momentum"]))  # Nesterov
        rows, columns = p.shape[-2:]
        p.mul_(1 - group["lr"] * group["decay"])
        p.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))


def orthogonalise(update: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix, roughly: singular values end between 0.7 and 1.2. Batched over experts."""
    a, b, c = NEWTON_SCHULZ
    tall = update.shape[-2] > update.shape[-1]
    x: Tensor = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
