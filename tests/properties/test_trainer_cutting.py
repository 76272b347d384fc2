"""Properties of the step's arithmetic over random batches: cuts, masks and order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.actors.trainer.batch import cut
from odradek.actors.trainer.objective import PRESETS, token_weights
from odradek.actors.trainer.testing import random_batch

TRAINED = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 80))
def test_cut_covers_every_sequence_once_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    runs = cut(lengths, budget)
    assert [i for run in runs for i in run] == list(range(len(lengths)))
    assert all(len(run) == 1 or sum(lengths[i] for i in run) <= budget for run in runs)


@given(trained=TRAINED, preset=st.sampled_from(sorted(PRESETS)), data=st.data())
@settings(deadline=None)
def test_weights_add_up_over_any_partition_and_follow_any_order(
    trained: list[int], preset: str, data: st.DataObject
) -> None:
    batch = random_batch(trained)
    weight = token_weights(batch, PRESETS[preset])
    order = data.draw(st.permutations(range(batch.sequences)))
    shuffled = token_weights(batch.select(order), PRESETS[preset])
    assert np.array_equal(shuffled, weight[batch.indices(order)])
    assert np.isfinite(weight).all() and not weight[~batch.loss_mask].any()
    assert (weight[batch.loss_mask] > 0).all()


@given(trained=TRAINED, keep=st.data())
@settings(deadline=None)
def test_select_keeps_each_sequence_whole(trained: list[int], keep: st.DataObject) -> None:
    batch = random_batch(trained)
    chosen = keep.draw(st.lists(st.integers(0, batch.sequences - 1), min_size=1, unique=True))
    part = batch.select(chosen)
    for new, old in enumerate(chosen):
        a, b = part.seq_starts[new : new + 2]
        c, d = batch.seq_starts[old : old + 2]
        assert np.array_equal(part.tokens[a:b], batch.tokens[c:d])
        assert np.array_equal(part.loss_mask[a:b], batch.loss_mask[c:d])
    assert part.trained_tokens().tolist() == batch.trained_tokens()[list(chosen)].tolist()


@given(data=st.data(), preset=st.sampled_from(sorted(PRESETS)))
@settings(deadline=None)
def test_the_segments_of_one_session_count_once_as_one_sequence_would(data: st.DataObject, preset: str) -> None:
    """A condensed session has as many sequences as contexts; cut up or whole, its tokens weigh the same."""
    whole = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    cuts = [data.draw(st.integers(0, n)) for n in whole]
    parts = [part for n, at in zip(whole, cuts, strict=True) for part in (at, n - at)]
    owners = np.repeat(np.arange(len(whole))[::-1], 2).astype(np.int32)
    condensed = replace(random_batch(parts), sessions=owners)
    one, two = token_weights(random_batch(whole), PRESETS[preset]), token_weights(condensed, PRESETS[preset])
    assert sorted(one[one > 0].tolist()) == sorted(two[two > 0].tolist())
