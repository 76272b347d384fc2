"""Sessions in one process: they end by the rules, log what the trainer computes, and are judged by hidden cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.batch import TrainingBatch
from odradek.actors.trainer.step import score
from odradek.infra.demo.demonstrations.stream import shipped_template
from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.warmstart.evaluate import engine_for, summary
from odradek.infra.demo.warmstart.rollouts import Rollout, _opened, run_sessions, solved
from odradek.streams.events.tasks import Budget


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    return Policy(ModelConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8), seed=1)


@pytest.fixture(scope="module")
def sessions(policy: Policy) -> list[Rollout]:
    tasks = [(make_task("train", 0, i), i) for i in range(6)]
    return run_sessions(engine_for(policy), shipped_template(), tasks, budget=Budget(max_turn_tokens=30))


def test_every_session_ends_within_its_budget(sessions: list[Rollout]) -> None:
    for r in sessions:
        assert r.finished and 1 <= r.turns <= Budget().max_turns
        assert len(r.tokens) == len(r.sampled) == len(r.logprobs) <= Budget().max_context_tokens
    assert "solved" in summary(sessions)


def test_logged_logprobs_are_the_trainers_bit_for_bit(policy: Policy, sessions: list[Rollout]) -> None:
    lengths = [len(r.tokens) for r in sessions]
    total = sum(lengths)
    mask = np.array([s for r in sessions for s in r.sampled])
    logged = np.array([x for r in sessions for x in r.logprobs], np.float32)
    batch = TrainingBatch(
        tokens=np.array([t for r in sessions for t in r.tokens], np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        seq_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=logged,
        advantages=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
    )
    assert mask.any()
    assert np.array_equal(score(policy, batch)[mask], logged[mask])


def test_same_seed_samples_the_same_session_whatever_runs_beside_it(policy: Policy, sessions: list[Rollout]) -> None:
    alone = run_sessions(
        engine_for(policy), shipped_template(), [(make_task("train", 0, 3), 3)], budget=Budget(max_turn_tokens=30)
    )
    assert alone[0].tokens == sessions[3].tokens


def test_only_the_right_edit_solves_a_task() -> None:
    task = make_task("train", 0, 0)
    untouched = _opened(shipped_template(), task, 0)
    assert not solved(untouched)
    fixed = _opened(shipped_template(), task, 0)
    assert fixed.workspace.call("edit_file", {"path": task.fix.path, "old": task.fix.old, "new": task.fix.new}) == "ok"
    assert solved(fixed)
    broken = _opened(shipped_template(), task, 0)
    broken.workspace.files[task.target_path] = "import os\n"
    assert not solved(broken)
