"""Upcycling: the mixture begins as the dense policy, and training parts its experts and balances their load."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from odradek.actors.policy.errors import UnsupportedModelError
from odradek.actors.policy.hf import load_hf
from odradek.actors.policy.model import Policy
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH, training_stream
from odradek.infra.demo.warmstart import batches, train
from odradek.infra.demo.warmstart.batches import PAD, RouterLoad, target_nll
from odradek.infra.demo.warmstart.upcycle import CHOSEN, upcycled

SHIPPED = TOKENIZER_PATH.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def dense() -> Policy:
    return load_hf(SHIPPED)


def _logits(policy: Policy, ids: list[int]) -> Tensor:
    starts = torch.tensor([0, len(ids)], dtype=torch.int32)
    with torch.no_grad():
        return policy.forward_packed(torch.tensor(ids), torch.arange(len(ids)), starts) @ policy.head_weight.T


def test_mixture_begins_as_the_dense_policy(dense: Policy) -> None:
    sparse = upcycled(dense, 4, seed=3)
    for one in islice(training_stream(9), 3):
        torch.testing.assert_close(_logits(sparse, one.token_ids), _logits(dense, one.token_ids), atol=2e-4, rtol=2e-4)
    assert sparse.config.num_experts == 4
    assert sparse.config.moe_intermediate_size == dense.config.intermediate_size


def test_upcycled_mixture_opens_in_transformers(dense: Policy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sparse = upcycled(dense, 4, seed=3)
    sparse.save_hf(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    ids = next(training_stream(9)).token_ids
    with torch.no_grad():
        torch.testing.assert_close(theirs(torch.tensor([ids])).logits[0], _logits(sparse, ids), atol=1e-3, rtol=1e-3)


def test_a_mixture_is_not_upcycled_again(dense: Policy) -> None:
    with pytest.raises(UnsupportedModelError, match="4 experts"):
        upcycled(upcycled(dense, 4, seed=0), 8, seed=0)


def test_load_counts_choices_of_real_tokens_only(dense: Policy) -> None:
    sparse = upcycled(dense, 4, seed=0)
    ids = next(training_stream(2)).token_ids
    rows = torch.tensor([ids + [PAD] * 300])
    padded, alone = RouterLoad(rows[:, :-1].flatten() != PAD), RouterLoad(torch.ones(len(ids), dtype=torch.bool))
    with torch.no_grad():
        target_nll(sparse, rows, padded.ops)
        target_nll(sparse, torch.tensor([[*ids, PAD]]), alone.ops)
    assert len(padded.shares) == sparse.config.num_hidden_layers
    for share, expected in zip(padded.shares, alone.shares, strict=True):
        torch.testing.assert_close(share, expected)
        assert float(share.sum()) == pytest.approx(1)
    torch.testing.assert_close(padded.loss, alone.loss)


def test_continued_training_parts_the_experts_and_writes_a_policy_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (train, batches):
        monkeypatch.setattr(module, "POOL", 16)
    monkeypatch.setattr(train, "CONTINUED_WARMUP", 1)
    arguments = ["--from", str(SHIPPED), "--experts", "4", "--tokens", "9000", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(train.main, arguments)
    assert result.exit_code == 0, result.output
    sparse = load_hf(tmp_path / "out")
    w2 = dict(sparse.named_parameters())["blocks.0.w2"].detach()
    assert all(float((w2[0] - w2[e]).abs().max()) > 1e-3 for e in range(1, 4))
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["num_experts_per_tok"] == CHOSEN
    assert Tokenizer.from_file(tmp_path / "out" / "tokenizer.json").vocab_size == sparse.config.vocab_size
