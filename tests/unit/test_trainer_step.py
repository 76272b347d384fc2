"""One training step: what it must not depend on, what it must leave alone, and that it learns."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch

from odradek.actors.trainer.batch import TrainingBatch, cut
from odradek.actors.trainer.errors import BatchError, CheckpointError, DivergedError
from odradek.actors.trainer.objective import PRESETS, ObjectiveSettings
from odradek.actors.trainer.optim import AdamW, OptimiserSettings
from odradek.actors.trainer.step import StepReport, StepSettings, score, train_step
from odradek.actors.trainer.testing import gradients, random_batch, tiny_policy, weights

ONE = StepSettings(minibatches=1)


def on_policy(batch: TrainingBatch, policy_seed: int = 0) -> TrainingBatch:
    """The batch with the log-probs that the policy itself gives: ratio 1 everywhere."""
    logprobs = np.where(batch.loss_mask, score(tiny_policy(policy_seed), batch), 0).astype(np.float32)
    return _with(batch, sampler_logprobs=logprobs)


def _with(batch: TrainingBatch, **changes: np.ndarray) -> TrainingBatch:
    return dataclasses.replace(batch, **changes)


def step(
    batch: TrainingBatch, settings: StepSettings = ONE, number: int = 5
) -> tuple[StepReport, dict[str, torch.Tensor]]:
    policy = tiny_policy()
    report = train_step(policy, AdamW(policy), batch, settings, torch.Generator().manual_seed(1), step=number)
    return report, weights(policy)


def raw_gradient(batch: TrainingBatch, settings: StepSettings) -> dict[str, torch.Tensor]:
    """The gradient that one optimiser step would see, taken from a step that cannot move or clip."""

    class Keep(AdamW):
        seen: dict[str, torch.Tensor]

        def step(self, s: OptimiserSettings, rate: float) -> None:
            self.seen = gradients(policy)

    policy = tiny_policy()
    keep = Keep(policy)
    unclipped = msgspec.structs.replace(settings, optimiser=OptimiserSettings(clip_norm=1e9))
    train_step(policy, keep, batch, unclipped, torch.Generator().manual_seed(1), step=1)
    return keep.seen


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_case_mlx_lm_1413_gradient_does_not_depend_on_how_the_batch_is_cut(preset: str) -> None:
    """Rows with 3, 5 and 40 trained tokens, as one and as three micro-batches."""
    batch = random_batch([3, 5, 40])
    settings = StepSettings(objective=PRESETS[preset], minibatches=1)
    whole = raw_gradient(batch, msgspec.structs.replace(settings, micro_tokens=1000))
    apart = raw_gradient(batch, msgspec.structs.replace(settings, micro_tokens=1))
    assert any(g.abs().max() > 0 for g in whole.values())
    for name in whole:
        torch.testing.assert_close(whole[name], apart[name], rtol=1e-4, atol=1e-6)


def test_case_automodel_3796_batch_without_trained_token_leaves_everything_unchanged() -> None:
    policy = tiny_policy()
    optimiser = AdamW(policy)
    rng = torch.Generator().manual_seed(1)
    train_step(policy, optimiser, random_batch([4, 6]), ONE, rng, step=1)  # Adam has momentum now
    before = weights(policy)
    report = train_step(policy, optimiser, random_batch([0, 0, 0]), ONE, rng, step=2)
    assert report.loss == 0.0 and report.trained_tokens == 0 and report.optimiser_steps == 0
    assert all(math.isfinite(value) for value in report.metrics().values())
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())


def test_case_automodel_3796_micro_batch_without_trained_token_equals_the_step_without_it() -> None:
    settings = StepSettings(minibatches=2, micro_tokens=1)
    _, without = step(random_batch([3, 5, 40]).select([0, 2]), settings)
    masked = random_batch([3, 5, 40])
    masked = _with(masked, loss_mask=masked.loss_mask & (masked.sequence_of_token() != 1))
    report, with_it = step(masked, settings)
    assert report.sequences == 2
    assert all(torch.equal(without[name], with_it[name]) for name in without)


def test_not_finite_gradient_is_refused_before_it_reaches_a_weight() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.embed[3, 0] = math.inf
    before = weights(policy)
    batch = random_batch([5])
    with pytest.raises(DivergedError, match="step 7"):
        train_step(policy, AdamW(policy), batch, ONE, torch.Generator(), step=7)
    assert all(torch.equal(before[name], now) for name, now in weights(policy).items())


def test_trained_tokens_of_positive_advantage_become_likelier() -> None:
    batch = on_policy(random_batch([6, 9, 4, 8]))
    batch = _with(batch, advantages=np.where(batch.sequence_of_token() % 2, 1, -1).astype(np.float32))
    policy = tiny_policy()
    settings = msgspec.structs.replace(ONE, optimiser=OptimiserSettings(learning_rate=1e-3))
    optimiser, rng = AdamW(policy), torch.Generator().manual_seed(0)
    for number in range(1, 6):
        train_step(policy, optimiser, batch, settings, rng, step=number)
    gain = score(policy, batch) - score(tiny_policy(), batch)
    good = batch.loss_mask & (batch.advantages > 0)
    bad = batch.loss_mask & (batch.advantages < 0)
    assert gain[good].mean() > gain[bad].mean()


def test_fresh_tokens_of_the_same_numerics_have_no_gap() -> None:
    batch = on_policy(random_batch([6, 9], version=4))
    report, _ = step(batch, number=5)
    assert report.fresh_tokens == 15 and report.fresh_gap_max == 0.0 and report.gap_max == 0.0
    assert report.ratio_mean == 1.0 and report.clip_fraction == 0.0 and report.approx_kl == 0.0
    stale, _ = step(random_batch([6, 9], version=3), number=5)
    assert stale.fresh_tokens == 0 and stale.gap_max > 0


def test_entropy_is_that_of_the_policy() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        policy.embed.zero_()  # uniform over the vocabulary
    batch = random_batch([7, 2])
    report = train_step(policy, AdamW(policy), batch, ONE, torch.Generator(), step=1)
    assert report.entropy == pytest.approx(math.log(61), rel=1e-5)


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_minibatches_each_take_one_optimiser_step(anchor: str) -> None:
    objective = ObjectiveSettings(anchor=anchor)  # type: ignore[arg-type]
    report, _ = step(random_batch([5, 3, 9, 1]), StepSettings(objective=objective, minibatches=2))
    assert report.optimiser_steps == 2 and report.sequences == 4 and report.trained_tokens == 18
    alone, _ = step(random_batch([5]), StepSettings(objective=objective, minibatches=2))
    assert alone.optimiser_steps == 1


def test_same_generator_same_weights() -> None:
    settings = StepSettings(minibatches=2)
    _, a = step(random_batch([5, 3, 9, 1]), settings)
    _, b = step(random_batch([5, 3, 9, 1]), settings)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_learning_rate_warms_up_and_zero_changes_nothing() -> None:
    settings = OptimiserSettings(learning_rate=8e-4, warmup_steps=4)
    assert [settings.rate(n) for n in (1, 2, 4, 9)] == pytest.approx([2e-4, 4e-4, 8e-4, 8e-4])
    still = StepSettings(optimiser=OptimiserSettings(learning_rate=0.0))
    report, after = step(random_batch([5, 3]), still)
    assert report.learning_rate == 0.0
    assert all(torch.equal(after[name], now) for name, now in weights(tiny_policy()).items())


def test_embedding_rate_is_scaled_and_the_final_norm_inversely() -> None:
    settings = StepSettings(optimiser=OptimiserSettings(embedding_lr_scale=4.0, warmup_steps=0), minibatches=1)
    plain = StepSettings(optimiser=OptimiserSettings(warmup_steps=0), minibatches=1)
    first = weights(tiny_policy())
    _, scaled = step(random_batch([5, 3]), settings)
    _, unscaled = step(random_batch([5, 3]), plain)

    def moved(after: dict[str, torch.Tensor], name: str) -> float:
        return float((after[name] - first[name]).abs().max())

    assert moved(scaled, "embed") == pytest.approx(4 * moved(unscaled, "embed"), rel=1e-3)
    assert moved(scaled, "final_norm") == pytest.approx(moved(unscaled, "final_norm") / 4, rel=1e-2)
    assert moved(scaled, "blocks.0.qkv") == pytest.approx(moved(unscaled, "blocks.0.qkv"), rel=1e-3)


def test_score_equals_the_log_softmax_of_the_logits() -> None:
    policy, batch = tiny_policy(), random_batch([3, 8])
    with torch.no_grad():
        tokens = torch.from_numpy(batch.tokens).long()
        hidden = policy.forward_packed(
            tokens, torch.from_numpy(batch.positions).long(), torch.from_numpy(batch.seq_starts)
        )
        wanted = torch.log_softmax(hidden @ policy.embed.T, -1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    got = score(policy, batch, micro_tokens=1)
    inside = np.setdiff1d(np.arange(1, len(tokens)), batch.seq_starts)
    np.testing.assert_allclose(got[inside], wanted[inside - 1], atol=1e-5)
    assert not got[batch.seq_starts[:-1]].any()


def test_cut_never_splits_a_sequence() -> None:
    assert cut([5, 3, 4, 100, 1], 8) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert cut([], 8) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"positions": np.zeros(3, np.int32)}, "positions has 3 entries"),
        ({"seq_starts": np.array([0, 9, 5, 20], np.int32)}, "ascend"),
        ({"loss_mask": np.ones(20, np.bool_)}, "first token of sequence 0"),
        ({"sampler_logprobs": np.full(20, np.nan, np.float32)}, "sampler_logprobs of trained token 4"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change: dict[str, np.ndarray], named: str) -> None:
    batch = random_batch([3, 5])
    assert len(batch.tokens) == 20
    with pytest.raises(BatchError, match=named):
        _with(batch, **change)


def test_adamw_equals_the_library_one() -> None:
    ours, theirs = tiny_policy(), tiny_policy()
    settings = OptimiserSettings(learning_rate=3e-3, weight_decay=0.1)
    mine = AdamW(ours)
    library = torch.optim.AdamW(
        theirs.parameters(),
        settings.learning_rate,
        (settings.beta1, settings.beta2),
        settings.eps,
        settings.weight_decay,
        foreach=False,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        mine.step(settings, settings.learning_rate)
        library.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_optimiser_state_goes_on_where_it_stopped() -> None:
    batch, rng = random_batch([5, 3]), torch.Generator()
    policy = tiny_policy()
    optimiser = AdamW(policy)
    train_step(policy, optimiser, batch, ONE, rng, step=1)
    again = tiny_policy()
    again.load_state_dict(policy.state_dict())
    resumed = AdamW(again)
    resumed.load_state_tensors(optimiser.state_tensors(), optimiser.updates)
    train_step(policy, optimiser, batch, ONE, rng, step=2)
    train_step(again, resumed, batch, ONE, rng, step=2)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), again.parameters(), strict=True))


def test_optimiser_state_of_another_policy_is_refused() -> None:
    state = AdamW(tiny_policy()).state_tensors()
    state.pop("exp_avg.embed")
    with pytest.raises(CheckpointError, match=r"exp_avg\.embed"):
        AdamW(tiny_policy()).load_state_tensors(state, 1)


def test_the_segments_of_one_session_meet_in_one_minibatch() -> None:
    """However the draw falls: they share a reward, and one update must see all of what it was given for."""
    batch = _with(random_batch([4, 6, 3]), sessions=np.array([7, 7, 2], np.int32))
    for seed in range(4):
        policy, rng = tiny_policy(), torch.Generator().manual_seed(seed)
        report = train_step(policy, AdamW(policy), batch, StepSettings(minibatches=3), rng, step=1)
        assert report.optimiser_steps == report.sequences == 2 and report.trained_tokens == 13
    ordinary, _ = step(random_batch([4, 6, 3]), StepSettings(minibatches=3))
    assert ordinary.optimiser_steps == 3
