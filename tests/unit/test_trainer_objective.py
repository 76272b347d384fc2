"""The objective: its gradient where the clip acts, its presets, its anchors, its weights."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from odradek.actors.trainer.objective import PRESETS, ObjectiveSettings, TokenInputs, policy_loss, token_weights
from odradek.actors.trainer.testing import random_batch

DR_GRPO = PRESETS["dr_grpo"]


def inputs(
    ratio: list[float],
    advantage: list[float],
    *,
    start: list[float] | None = None,
    reference: list[float] | None = None,
    sequence: list[int] | None = None,
) -> TokenInputs:
    """Tokens whose sampler log-prob is -1 and whose ratio to it is as given; weight 1 each."""
    n = len(ratio)
    logprob = (torch.tensor(ratio, dtype=torch.float64).log() - 1).requires_grad_()
    return TokenInputs(
        logprob=logprob,
        sampler=torch.full((n,), -1.0, dtype=torch.float64),
        start=None if start is None else torch.tensor(start, dtype=torch.float64).log() - 1,
        reference=None if reference is None else torch.tensor(reference, dtype=torch.float64).log() - 1,
        advantage=torch.tensor(advantage, dtype=torch.float64),
        weight=torch.ones(n, dtype=torch.float64),
        sequence=torch.tensor(sequence or list(range(n))),
    )


def gradient(x: TokenInputs, settings: ObjectiveSettings) -> Tensor:
    policy_loss(x, settings).loss.backward()  # type: ignore[no-untyped-call]
    assert x.logprob.grad is not None
    return x.logprob.grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.2, 1.0, -1.2),
        (1.3, 1.0, 0.0),  # above 1.28 a good token is left alone
        (0.7, 1.0, -0.7),  # below 0.8 a good token still grows
        (0.7, -1.0, 0.0),  # below 0.8 a bad token is left alone
        (1.3, -1.0, 1.3),  # above 1.28 a bad token still shrinks
    ],
)
def test_behaviour_anchor_clips_the_ratio_to_the_sampler(ratio: float, advantage: float, expected: float) -> None:
    assert gradient(inputs([ratio], [advantage]), DR_GRPO).item() == pytest.approx(expected)


def test_proximal_anchor_clips_the_ratio_to_the_first_weights_and_caps_the_correction() -> None:
    settings = msgspec.structs.replace(DR_GRPO, anchor="proximal", proximal_cap=2.0)
    # lp_start / sampler = 1.5, and trained / start = 1: the correction alone acts, although 1.5 is beyond the clip.
    assert gradient(inputs([1.5], [1.0], start=[1.5]), settings).item() == pytest.approx(-1.5)
    # Five times likelier at the start: capped at 2.
    assert gradient(inputs([5.0], [1.0], start=[5.0]), settings).item() == pytest.approx(-2.0)
    # Trained / start = 1.3: clipped.
    assert gradient(inputs([1.3 * 0.5], [1.0], start=[0.5]), settings).item() == 0.0


def test_proximal_anchor_without_first_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="first weights"):
        policy_loss(inputs([1.0], [1.0]), msgspec.structs.replace(DR_GRPO, anchor="proximal"))


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    got = gradient(inputs([1.1, 3.0], [1.0, 1.0]), PRESETS["cispo"])
    assert got.tolist() == pytest.approx([-1.1, -1.28])


def test_gspo_clips_whole_sequences_by_their_mean_log_ratio() -> None:
    # Sequence 0: ratios 2 and 1/2 cancel, nothing is clipped; sequence 1: mean far above, everything is.
    x = inputs([2.0, 0.5, 2.0, 2.0], [1.0] * 4, sequence=[0, 0, 1, 1])
    out = policy_loss(x, PRESETS["gspo"])
    assert out.clipped.tolist() == [False, False, True, True]
    assert gradient(x, PRESETS["gspo"]).tolist() == pytest.approx([-1.0, -1.0, 0.0, 0.0])


def test_rloo_is_the_plain_policy_gradient() -> None:
    assert gradient(inputs([0.3, 4.0], [1.5, -2.0]), PRESETS["rloo"]).tolist() == [-1.5, 2.0]


def test_kl_pulls_towards_the_reference() -> None:
    settings = msgspec.structs.replace(DR_GRPO, kl_coefficient=0.5)
    x = inputs([1.0, 1.0], [0.0, 0.0], reference=[1.0, 2.0])
    out = policy_loss(x, settings)
    assert out.kl.tolist() == pytest.approx([0.0, 2 - 1 - math.log(2)])
    assert gradient(x, settings).tolist() == pytest.approx([0.0, -0.5])
    with pytest.raises(ValueError, match="reference log-probs"):
        policy_loss(inputs([1.0], [1.0]), settings)


def test_hugely_unlikely_token_keeps_loss_and_gradient_finite() -> None:
    for preset in PRESETS.values():
        x = inputs([1e-300, 1e300], [1.0, -1.0])
        assert torch.isfinite(policy_loss(x, preset).loss)
        assert torch.isfinite(gradient(x, preset)).all()


def test_weights_of_each_aggregation() -> None:
    batch = random_batch([3, 5, 40])
    counts = {"constant": None, "sequence_mean": None, "token_mean": None}
    per = {}
    for name in counts:
        w = token_weights(batch, ObjectiveSettings(aggregation=name, constant_tokens=10))  # type: ignore[arg-type]
        assert not w[~batch.loss_mask].any()
        per[name] = [float(w[batch.indices([s])].max()) for s in range(3)]
    assert per["constant"] == pytest.approx([1 / 30] * 3)
    assert per["sequence_mean"] == pytest.approx([1 / 9, 1 / 15, 1 / 120])
    assert per["token_mean"] == pytest.approx([1 / 48] * 3)


def test_constant_normaliser_has_no_length_bias() -> None:
    """Dr. GRPO: a token weighs the same in a short and in a long answer."""
    short = token_weights(random_batch([2, 2]), DR_GRPO)
    long = token_weights(random_batch([2, 90]), DR_GRPO)
    assert short.max() == long.max() == long[long > 0].min()


@pytest.mark.parametrize("aggregation", ["constant", "sequence_mean", "token_mean"])
def test_untrained_sequences_count_in_no_normaliser(aggregation: str) -> None:
    settings = ObjectiveSettings(aggregation=aggregation)  # type: ignore[arg-type]
    batch = random_batch([3, 0, 7])
    assert np.array_equal(
        token_weights(batch, settings)[batch.indices([0, 2])], token_weights(batch.select([0, 2]), settings)
    )


def test_batch_without_trained_token_has_zero_weights() -> None:
    for settings in PRESETS.values():
        assert not token_weights(random_batch([0, 0]), settings).any()


def test_presets_name_the_published_algorithms() -> None:
    assert set(PRESETS) == {"dr_grpo", "grpo", "dapo", "gspo", "cispo", "rloo"}
    assert (1 - DR_GRPO.clip_low, 1 + DR_GRPO.clip_high) == (0.8, 1.28)
