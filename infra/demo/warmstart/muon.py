"""Muon, the optimiser of the warm start's block matrices; AdamW takes the rest.

These are the settings that were seen to teach copying; AdamW alone was not tried. RL then begins with fresh Adam
moments, so nothing of this state is shipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import Tensor, nn

from odradek.actors.policy.model import Policy

NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
"""Quintic iteration of Muon (Jordan et al. 2024): pushes all singular values towards 1 in five rounds."""

NEWTON_SCHULZ_ROUNDS: Final = 5
"""Fewer leaves small directions unscaled, more only costs time."""


def warm_start_optimisers(policy: Policy, muon_rate: float, adamw_rate: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on the matrices inside the blocks, AdamW on embedding, norms and routers (scales as in `trainer.optim`)."""

    def is_matrix(name: str) -> bool:
        return name.startswith("blocks.") and name.endswith((".qkv", ".o", ".w13", ".w2"))

    named = dict(policy.named_parameters())
    scale = policy.config.embedding_lr_scale
    scales = {"embed": scale, "final_norm": 1 / scale}
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in named.items():
        if not is_matrix(name):
            groups.setdefault(scales.get(name, 1.0), []).append(p)
    rest = [{"params": params, "lr": adamw_rate * s, "scale": s} for s, params in groups.items()]
    matrices = [p for name, p in named.items() if is_matrix(name)]
    return Muon(matrices, muon_rate), torch.optim.AdamW(rest, adamw_rate, betas=(0.9, 0.95), weight_decay=0.0)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set each group to `rate` times its own scale."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


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
