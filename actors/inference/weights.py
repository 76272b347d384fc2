"""Weight versions that an engine holds: checked on arrival, swapped whole, pruned with care.

Promises:
- Nothing serves that was not checked: every tensor present, of the right shape, finite, and with the digest that the
  publisher named. A refusal names what was wanted; the served version stays.
- A version number means one set of weights for ever: other tensors under a held number are refused.
- At least `keep` versions stay (the current one and the one before it), and any version that a request or a pin needs.
`build` is pure and slow (run it beside the engine's thread); `install` is a dictionary entry (run it between steps).
The state as published is kept beside the model, because a delta applies to the published bits, not to the float32 copy
that computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from odradek.actors.inference.errors import NoWeightsError, VersionNotHeldError, WeightsRefusedError
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.errors import PolicyError
from odradek.actors.policy.hf import load_hf_state
from odradek.actors.policy.model import Policy


@dataclass(frozen=True, slots=True)
class FetchedWeights:
    """What a loader brings: a complete state under Hugging Face names, as published, and its digest if it has one."""

    version: int
    state: Mapping[str, Tensor]
    digest: str | None = None


Loader = Callable[[int, Mapping[int, Mapping[str, Tensor]]], FetchedWeights]
"""`loader(version, held states by version)`: fetches a version, whole or by deltas on a held one; blocking, with its
own deadline. It raises what is missing (a parent, an object, a byte) and then nothing changes here."""


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """One checked version, ready to sample with."""

    version: int
    policy: Policy
    state: Mapping[str, Tensor]
    """As published, under Hugging Face names."""
    digest: str


def state_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(state):
        t = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{t.dtype}\0{tuple(t.shape)}\0".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def build(config: ModelConfig, version: int, state: Mapping[str, Tensor], digest: str | None = None) -> HeldWeights:
    """Check `state` and make a model of it; raises `WeightsRefusedError` naming the first thing that is wrong."""
    found = state_digest(state)
    if digest is not None and digest != found:
        raise WeightsRefusedError(f"weights {version}: digest is {found}, expected {digest}; fetch them again")
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise WeightsRefusedError(f"weights {version}: {name} has dtype {tensor.dtype}, expected a floating one")
        if not bool(torch.isfinite(tensor).all()):
            raise WeightsRefusedError(f"weights {version}: {name} holds NaN or infinity; the step that wrote it failed")
    policy = Policy(config, seed=None)
    try:
        load_hf_state(policy, state, f"weights {version}")
    except PolicyError as e:
        raise WeightsRefusedError(str(e)) from e
    policy.requires_grad_(False).eval()
    return HeldWeights(version, policy, dict(state), found)


class WeightStore:
    """The held versions and which one is current; one thread only."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._held: dict[int, HeldWeights] = {}
        """In order of last becoming current (or arrival), oldest first."""
        self._pins: set[int] = set()
        self.current: int | None = None

    @property
    def states(self) -> dict[int, Mapping[str, Tensor]]:
        """What a delta can be applied to."""
        return {version: held.state for version, held in self._held.items()}

    @property
    def versions(self) -> list[int]:
        return sorted(self._held)

    def get(self, version: int) -> HeldWeights:
        held = self._held.get(version)
        if held is None:
            raise VersionNotHeldError(
                f"weights {version} are not held here (held: {self.versions}); load them or ask another replica"
            )
        return held

    def require_current(self) -> int:
        if self.current is None:
            raise NoWeightsError("no weights are loaded yet; load a version first")
        return self.current

    def check(self, weights: HeldWeights) -> None:
        """Refuse other tensors under a number that is held."""
        old = self._held.get(weights.version)
        if old is not None and old.digest != weights.digest:
            raise WeightsRefusedError(
                f"weights {weights.version} are held with digest {old.digest}, refused digest {weights.digest}: "
                "a version number is never used twice; publish a new version or a new policy id"
            )

    def install(self, weights: HeldWeights, current: bool) -> None:
        """Hold `weights`: as the current version, or else pinned beside it until `unpin`."""
        self.check(weights)
        held = self._held.get(weights.version, weights)
        if not current:
            self._held.setdefault(weights.version, held)
            self._pins.add(weights.version)
            return
        self._held.pop(weights.version, None)
        self._held[weights.version] = held
        self.current = weights.version

    def unpin(self, version: int) -> None:
        self._pins.discard(version)

    def prune(self, needed: Iterable[int]) -> list[int]:
        """Drop what nothing needs beyond the last `keep` versions that were current; returns it."""
        safe = {*needed, *self._pins}
        served = [v for v in self._held if v not in self._pins]
        dropped = [v for v in served[: max(0, len(served) - self._keep)] if v not in safe]
        for version in dropped:
            del self._held[version]
        return dropped
