"""Packing holds for any lengths: nothing lost, nothing twice, nothing cut, nothing over the budget that fits it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.assembly_world import records, turn

from odradek.streams.assembly.v1.advantage import advantages, spread
from odradek.streams.assembly.v1.pack import pack
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.ownership import accepted


@given(st.lists(st.integers(1, 700), max_size=80), st.integers(1, 2000))
def test_packing_places_every_member_once_and_keeps_the_budget(lengths: list[int], budget: int) -> None:
    layout = pack(lengths, budget)
    placed = [member for micro in layout for member in micro.members]
    assert sorted(placed) == list(range(len(lengths)))
    for micro in layout:
        assert micro.tokens == sum(lengths[m] for m in micro.members)
        assert micro.tokens <= budget or len(micro.members) == 1
        assert micro.members == sorted(micro.members)


@given(st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.97, 1.0]), min_size=2, max_size=16))
def test_equal_rewards_have_equal_advantages_and_no_spread_means_none(rewards: list[float]) -> None:
    values = advantages(rewards, "dr_grpo", 1e-9)
    assert all(
        (a == b) or ra != rb
        for a, ra in zip(values, rewards, strict=True)
        for b, rb in zip(values, rewards, strict=True)
    )
    assert any(values) == spread(rewards, 1e-9) == (len(set(rewards)) > 1)


@given(st.data(), st.integers(1, 6))
def test_the_fold_of_one_owner_is_the_same_wherever_a_zombie_writes(data: st.DataObject, turns: int) -> None:
    """Records of an older epoch, at any place after the newer one began, change nothing."""
    made = [turn(i, 2 * i, [1], [i]) for i in range(turns)]
    good = records("s", made, epoch=100)
    older = [(0, "s/old", good[0][2], good[0][3])]
    zombie = records("s", [turn(i, 2 * i, [9], [9]) for i in range(turns)], epoch=0)[1:]
    mixed = [*older, *good]
    for record in zombie:
        at = data.draw(st.integers(2, len(mixed)))
        mixed.insert(at, (record[0], f"zombie{record[0]}", record[2], record[3]))
    assert sequence_of("s", mixed).segments == sequence_of("s", good).segments
    assert len(list(accepted(mixed))) == len(good) + 1
