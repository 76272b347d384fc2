"""The warm start: schedule, weights of tokens, resumption, and that its plain forward is the policy's."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import load_hf
from odradek.actors.policy.model import Policy
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH, shipped_template, training_stream
from odradek.infra.demo.warmstart import batches, train
from odradek.infra.demo.warmstart.batches import pool_batches, target_nll
from odradek.kernels.logprob.api import token_logprobs

SMALL = ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
SPARSE = ModelConfig(hidden_size=32, num_hidden_layers=2, head_dim=8, num_experts=4, moe_intermediate_size=24)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("config", [SMALL, SPARSE], ids=["dense", "experts"])
def test_plain_padded_forward_is_the_policy(config: ModelConfig) -> None:
    policy = Policy(config)
    rows = torch.randint(1024, (3, 70), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        nll = target_nll(policy, rows)
        for row, of_row in zip(rows, nll, strict=True):
            starts = torch.tensor([0, len(row)], dtype=torch.int32)
            hidden = policy.forward_packed(row, torch.arange(len(row)), starts)
            logprob, _ = token_logprobs(hidden[:-1], policy.head_weight, row[1:])
            torch.testing.assert_close(of_row, -logprob, atol=1e-4, rtol=1e-4)


def test_rate_rises_stays_and_falls_by_tokens() -> None:
    total = 1000
    assert train.rate_factor(0, 0, total) == pytest.approx(1 / train.WARMUP_STEPS)
    assert train.rate_factor(500, 399, total) == 1.0
    assert train.rate_factor(500, 700, total) == pytest.approx(0.5)
    assert train.rate_factor(500, 999, total) == train.FLOOR
    assert train.rate_factor(500, 500, total, continued=0.2) == pytest.approx(0.1)


def test_batches_hold_every_demonstration_with_its_weights() -> None:
    examples = list(islice(training_stream(3), 320))
    made = pool_batches(iter(examples), 2000, 640, random.Random(0))
    assert sum(b.tokens for b in made) == sum(len(e.token_ids) for e in examples)
    assert sum(int(b.agent_BW.sum()) for b in made) == sum(sum(e.agent_mask) for e in examples)
    weight = sum(float(b.weight_BW.double().sum()) for b in made)
    assert weight == pytest.approx(sum(sum(e.context_weight) for e in examples), rel=1e-6)
    for b in made:
        assert (b.weight_BW[b.agent_BW] == 1).all()
        assert not b.weight_BW[b.ids_BW == 0].any(), "padding has no weight"


def test_interrupted_run_ends_with_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ModelConfig", lambda vocab_size, num_experts: SMALL)
    monkeypatch.setattr(train, "SAVE_SECONDS", 0.0)
    for module in (train, batches):
        monkeypatch.setattr(module, "POOL", 16)

    def run(out: str) -> None:
        result = CliRunner().invoke(train.main, ["--tokens", "6000", "--out", str(tmp_path / out)])
        assert result.exit_code == 0, result.output

    run("whole")
    train_pool = train.WarmStart.train_pool

    def killed_in_the_second_pool(self: train.WarmStart, *args: object) -> None:
        if self.pools == 1:
            raise KeyboardInterrupt
        train_pool(self, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(train.WarmStart, "train_pool", killed_in_the_second_pool)
        stopped = CliRunner().invoke(train.main, ["--tokens", "6000", "--out", str(tmp_path / "cut")])
        assert stopped.exit_code != 0 and not (tmp_path / "cut" / "config.json").exists()
    run("cut")
    whole, cut = load_hf(tmp_path / "whole"), load_hf(tmp_path / "cut")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), cut.parameters(), strict=True))


def test_shipped_weights_fit_the_shipped_tokenizer_and_the_size_limit() -> None:
    folder = TOKENIZER_PATH.parent
    policy = load_hf(folder)
    assert policy.config.vocab_size == shipped_template().tokenizer.vocab_size
    assert (folder / "model.safetensors").stat().st_size <= 10_000_000
