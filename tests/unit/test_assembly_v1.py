"""Assembly's promises (streams/assembly/v1), each by its name, and the cases of neighbouring projects."""

from __future__ import annotations

import math
from array import array

import msgspec
import pytest
from support.assembly_world import LANE, group, nobody, records, sequence, turn

from odradek.streams.assembly.v1 import merkle
from odradek.streams.assembly.v1.advantage import advantages, spread
from odradek.streams.assembly.v1.batch import Positions, build, materialise, reassemble, verify
from odradek.streams.assembly.v1.pack import pack
from odradek.streams.assembly.v1.select import Dropped, Kept, choose, select, trained_masks
from odradek.streams.assembly.v1.sequence import MalformedSession, sequence_of
from odradek.streams.codec import f32
from odradek.streams.events.batches import BatchAssembled

AT = Positions(config_offset=0, input_offset=9, subjects_offset=0, weights_offset=0)


def built(*groups: object, ordinal: int = 0) -> BatchAssembled:
    chosen = choose(groups, LANE, nobody)  # type: ignore[arg-type]
    return build(chosen.kept, chosen.dropped, LANE, ordinal, AT)


# -- sequences ---------------------------------------------------------------------------------------------------


def test_every_sampled_token_is_there_once_with_its_version_and_logprob() -> None:
    turns = [turn(0, 0, [1, 2], [3, 4, 5], [(0, 7), (2, 8)]), turn(1, 5, [6], [7], [(0, 8)])]
    made = sequence_of("s", records("s", turns))
    (segment,) = made.segments
    assert list(segment.tokens) == [1, 2, 3, 4, 5, 6, 7]
    assert list(segment.mask) == [0, 0, 1, 1, 1, 0, 1]
    assert list(segment.versions) == [-1, -1, 7, 7, 8, -1, 8]
    assert [round(x, 2) for x in segment.logprobs] == [0, 0, -0.25, -0.5, -0.75, 0, -0.25]


def test_ids_mask_logprobs_and_versions_have_equal_length() -> None:
    """huggingface/trl #5144, #4974: rows come from sampled ids, so nothing is re-tokenised and no padding guessed."""
    end = 5
    made = sequence_of("s", records("s", [turn(0, 0, [end, 1], [2, end, end])]))
    (segment,) = made.segments
    assert len(segment.tokens) == len(segment.mask) == len(segment.logprobs) == len(segment.versions) == 5
    assert list(segment.mask) == [0, 0, 1, 1, 1], "true end tokens are trained"


def test_a_zombies_turn_is_not_in_the_sequence() -> None:
    good = records("s", [turn(0, 0, [1], [2])], epoch=5)
    zombie = (8, "zombie", msgspec.structs.replace(good[1][2], epoch=0), turn(1, 2, [9], [9]))
    made = sequence_of("s", [*good[:-1], zombie, good[-1]])
    assert list(made.segments[0].tokens) == [1, 2]


@pytest.mark.parametrize(
    "bad",
    [
        msgspec.structs.replace(turn(0, 0, [1], [2, 3]), logprobs=f32([-1.0])),
        turn(0, 4, [1], [2]),
        turn(0, 0, [1], [2, 3], [(1, 0)]),
        turn(0, 0, [1], [2, 3], [(0, 0), (2, 1)]),
    ],
)
def test_records_that_make_no_sequence_are_refused(bad: object) -> None:
    with pytest.raises(MalformedSession, match="session s at offset 1"):
        sequence_of("s", records("s", [bad]))  # type: ignore[list-item]


@pytest.mark.parametrize("reason", ["context", "turn_length", "turns"])
def test_a_session_ended_by_a_budget_is_flagged_truncated(reason: str) -> None:
    """verl-project/verl #7823: an answer ended by the context window does not count as complete."""
    made = sequence_of("s", records("s", [turn(0, 0, [1], [2])], reason=reason))  # type: ignore[arg-type]
    assert made.truncated
    assert not sequence_of("s", records("s", [turn(0, 0, [1], [2])])).truncated


def test_no_action_is_cut_from_a_long_session() -> None:
    """rllm-org/rllm PR 575: three turns of 40 tokens are all trained; a member longer than the budget is not cut."""
    turns = [turn(i, 41 * i, [1], list(range(40))) for i in range(3)]
    made = sequence_of("s", records("s", turns))
    assert made.sampled == 120
    assert [m.tokens for m in pack([made.tokens], 100)] == [made.tokens]


# -- advantages --------------------------------------------------------------------------------------------------


def test_seven_equal_rewards_give_exactly_zero() -> None:
    assert advantages([0.1] * 7, "dr_grpo", 1e-9) == [0.0] * 7
    assert not spread([0.1] * 7, 1e-9)


@pytest.mark.parametrize("method", ["dr_grpo", "grpo", "rloo"])
def test_advantages_are_float32_values_that_sum_to_about_zero(method: str) -> None:
    values = advantages([1.0, 0.0, 0.25, 0.97], method, 1e-9)
    assert f32(values) == f32([float(v) for v in values])
    assert abs(math.fsum(values)) < 1e-6


def test_rloo_is_the_reward_less_the_mean_of_the_others() -> None:
    assert advantages([1.0, 0.0, 0.0], "rloo", 1e-9) == pytest.approx([1.0, -0.5, -0.5])


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, math.nan], "dr_grpo", 1e-9)


# -- selection ---------------------------------------------------------------------------------------------------


def reason(made: Kept | Dropped) -> str:
    return made.reason if isinstance(made, Dropped) else "kept"


def test_groups_are_dropped_with_their_reason() -> None:
    assert reason(select(group("a", [1, 0]), LANE, nobody)) == "kept"
    assert reason(select(group("a", [1, 1]), LANE, nobody)) == "flat"
    assert reason(select(group("a", [1]), LANE, nobody)) == "infrastructure"
    assert reason(select(group("a", [1, 0], origin="eval"), LANE, nobody)) == "origin"
    undecodable = group("a", [1, 0])
    sequences = dict(undecodable.sequences)
    del sequences["a.0"]
    from dataclasses import replace

    assert reason(select(replace(undecodable, sequences=sequences), LANE, nobody)) == "undecodable"


def test_production_is_trained_on_only_under_a_standing_grant() -> None:
    """Guarantee 8."""
    ours = group("a", [1, 0], origin="production", subject="ada")
    assert reason(select(ours, LANE, nobody)) == "consent"
    assert reason(select(ours, LANE, lambda subject: subject == "ada")) == "kept"


def test_case_trl_3857_a_spread_between_groups_is_no_spread_inside_one() -> None:
    """huggingface/trl #3857: four constant groups of 4; the report counts them, and a mixed group trains as alone."""
    flat = [group(f"f{i}", [level] * 4, offset=i) for i, level in enumerate([0.0, 0.5, 0.5, 1.0])]
    chosen = choose(flat, LANE, nobody)
    assert not chosen.kept and [d.reason for d in chosen.dropped] == ["flat"] * 4
    mixed = group("m", [1.0, 0.0, 0.0, 1.0], offset=4)
    together = built(*flat, mixed)
    alone = built(mixed)
    assert (together.members, together.layout) == (alone.members, alone.layout), "its gradient is as if alone"
    assert [d.reason for d in together.dropped] == ["flat"] * 4


def test_tokens_over_the_staleness_bound_are_masked_and_their_session_stays_in_the_baseline() -> None:
    """Guarantee 6: the bound can be checked from the data alone."""
    batch = built(group("a", [1.0, 0.0], versions=[2, 5]), ordinal=5)
    old, new = batch.members
    assert (old.trained_tokens, old.masked_stale_tokens) == (0, 4)
    assert (new.trained_tokens, new.masked_stale_tokens) == (4, 0)
    assert new.advantage == -0.5, "the masked member still counts in the mean"
    masks, stale = trained_masks(sequence("x", 3), 5, 2)
    assert stale == 0 and sum(masks[0]) == 4


# -- batches -----------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bytes() -> None:
    make = lambda: built(group("a", [1, 0, 0, 1]), group("b", [0, 1], offset=3))  # noqa: E731
    assert msgspec.msgpack.encode(make()) == msgspec.msgpack.encode(make())


def test_a_batch_assembled_again_is_the_recorded_one() -> None:
    """Guarantee 5."""
    groups = [group("a", [1, 0]), group("f", [1, 1], offset=2), group("b", [0, 1], offset=3)]
    batch = built(*groups)
    assert reassemble(batch, groups, LANE, nobody) == batch


def test_verify_names_each_leaf_rebuilt_erased_missing_or_mismatch() -> None:
    one = group("a", [1, 0, 0, 1])
    batch = built(one)
    sequences = dict(one.sequences)
    assert set(verify(batch, sequences, LANE.max_staleness).values()) == {"rebuilt"}
    sequences["a.1"].segments[0].logprobs[3] += 1e-6
    del sequences["a.2"]
    verdicts = verify(batch, sequences, LANE.max_staleness)
    assert verdicts == {"a.0": "rebuilt", "a.1": "mismatch", "a.2": "missing", "a.3": "rebuilt"}

    def gone(_subject: str) -> bytes | None:
        raise KeyError

    assert set(verify(batch, one.sequences, LANE.max_staleness, gone).values()) == {"erased"}


@pytest.mark.parametrize("field", ["tokens", "logprobs", "versions"])
def test_a_leaf_covers_every_array(field: str) -> None:
    made = sequence("s")
    masks, _ = trained_masks(made, 0, 2)
    before = merkle.leaf(made, masks, 0.5)
    getattr(made.segments[0], field)[3] += 1
    assert merkle.leaf(made, masks, 0.5) != before


def test_a_leaf_covers_mask_advantage_and_key() -> None:
    made = sequence("s")
    masks, _ = trained_masks(made, 0, 2)
    other = [array("B", [0] * len(masks[0]))]
    leaves = {
        merkle.leaf(made, masks, 0.5),
        merkle.leaf(made, other, 0.5),
        merkle.leaf(made, masks, 0.25),
        merkle.leaf(made, masks, 0.5, b"key"),
    }
    assert len(leaves) == 4


def test_the_root_is_rfc_6962s() -> None:
    """Golden: the empty tree, and a tree of three leaves computed by hand from section 2.1."""
    import hashlib

    def h(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    a, b, c = (h(x) for x in (b"a", b"b", b"c"))
    leaf = [h(b"\x00" + x) for x in (a, b, c)]
    want = h(b"\x01" + h(b"\x01" + leaf[0] + leaf[1]) + leaf[2]).hex()
    assert merkle.root([a.hex(), b.hex(), c.hex()]) == want
    assert merkle.root([]) == hashlib.sha256(b"").hexdigest()


def test_materialise_gives_the_arrays_in_layout_order() -> None:
    one = group("a", [1.0, 0.0], tokens=5)
    batch = built(one)
    (micro,) = materialise(batch, one.sequences, LANE.max_staleness)
    assert list(micro.starts) == [0, 5, 10]
    assert list(micro.positions) == [0, 1, 2, 3, 4] * 2
    assert list(micro.mask) == [0, 0, 1, 1, 1] * 2
    assert list(micro.advantages) == [0.5] * 5 + [-0.5] * 5
    (without,) = materialise(batch, one.sequences, LANE.max_staleness, frozenset({"a.0"}))
    assert list(without.mask) == [0] * 5 + [0, 0, 1, 1, 1] and without.tokens == micro.tokens
