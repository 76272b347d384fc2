"""Muon, the warm start's optimiser."""

from __future__ import annotations

import torch

from odradek.infra.demo.warmstart.muon import Muon, orthogonalise


def test_muon_update_is_nearly_orthogonal_for_wide_tall_and_stacked_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in [(8, 32), (32, 8), (3, 16, 8)]:
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=generator)))
        assert singular.min() > 0.5 and singular.max() < 1.3


def test_muon_descends() -> None:
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    p = torch.nn.Parameter(torch.zeros(6, 4))
    muon = Muon([p], lr=0.05)
    first = float((target - p).detach().norm())
    for _ in range(30):
        muon.zero_grad()
        (p - target).square().sum().backward()
        muon.step()
    assert float((target - p).detach().norm()) < first / 2
