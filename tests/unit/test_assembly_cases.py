"""Situations reported by neighbouring projects, from a session's records to the trainer's arrays (cases/reports.md)."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.assembly_world import LANE, group, nobody, records, turn
from support.session_world import FolderEnvironment, MemoryJournal, ScriptedModel, runner, spec, template
from support.session_world import turn as turn_of

from odradek.actors.session.ports import Completion
from odradek.actors.trainer.loop import training_batch
from odradek.actors.trainer.objective import ObjectiveSettings, token_weights
from odradek.actors.trainer.step import score
from odradek.actors.trainer.testing import TINY, tiny_policy
from odradek.streams.assembly.v1.batch import Positions, build, materialise, owners
from odradek.streams.assembly.v1.select import GroupRecords, choose
from odradek.streams.assembly.v1.sequence import Sequence, sequence_of
from odradek.streams.codec import i32
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.sessions import ContextSummarized, SessionCompleted, WeightSpan

AT = Positions(config_offset=0, input_offset=9, subjects_offset=0, weights_offset=0)


def built(one: GroupRecords) -> BatchAssembled:
    chosen = choose([one], LANE, nobody)
    return build(chosen.kept, chosen.dropped, LANE, 0, AT)


class NeverStops(ScriptedModel):
    """Samples until it is cut off."""

    async def sample(self, *, max_new_tokens: int, **_: object) -> Completion:  # type: ignore[override]
        return Completion([7] * max_new_tokens, [-0.5] * max_new_tokens, [WeightSpan(0, 3)], "test", "length")


@pytest.mark.parametrize("prompt", [5, 7, 9])
async def test_case_verl_7823_an_answer_cut_by_the_window_is_truncated_though_under_the_cap(prompt: int) -> None:
    """verl-project/verl #7823, PR 7906: context 12, cap 10, a model that never stops. Here the window is moved so that
    the same room is left after a real prompt."""
    opening = len(template().open("fix test_total"))
    given = spec({}, max_context_tokens=opening + 12 - prompt, max_turn_tokens=10)
    journal = MemoryJournal()
    await runner(journal, NeverStops([]), FolderEnvironment(), given).run()
    (end,) = [body for body in journal.bodies() if isinstance(body, SessionCompleted)]
    made = sequence_of("s", journal.history("s"))
    assert made.truncated and end.reason in ("turn_length", "context")
    assert made.sampled == (12 - prompt if prompt < 9 else 0), "no turn is begun where none can say anything"


def test_case_nemo_rl_2821_a_template_that_drops_earlier_reasoning_doubles_nothing() -> None:
    """NVIDIA-NeMo/RL #2821; prime-rl #1334: turn N is no prefix of N + 1. What was sampled is trained once, where it
    was sampled; the rewritten history opens a segment of its own and is context only."""
    reasoning, answer, second = [20, 21, 22], [30, 31], [40, 41]
    first = turn(0, 0, [1, 2], reasoning + answer)
    rewritten = ContextSummarized(segment=1, prompt=i32([1, 2, *answer, 3]), cut_after_turn=0)
    later = turn(1, 5, [4], second)
    made = sequence_of("s", records("s", [first, rewritten, later]))  # type: ignore[list-item]
    assert [list(segment.tokens) for segment in made.segments] == [
        [1, 2, *reasoning, *answer],
        [1, 2, *answer, 3, 4, *second],
    ]
    trained = [t for s in made.segments for t, m in zip(s.tokens, s.mask, strict=True) if m]
    assert trained == [*reasoning, *answer, *second], "each sampled token once"


def test_case_trl_5144_a_pad_that_is_the_end_token_loses_no_true_end() -> None:
    """huggingface/trl #5144, #4974: what is trained has no padding at all, so nothing is guessed from ids; and nothing
    is tokenised again, so a tool's result that would be shorter the second time keeps the length it had."""
    end, tokenizer = 0, template().tokenizer
    result = [token for letter in "return total" for token in tokenizer.encode_text(letter)]
    assert len(tokenizer.encode_text(tokenizer.decode(result))) < len(result), "tokenised again it is shorter"
    one = group("a", [1.0, 0.0])
    said = [turn(0, 0, [end, 5], [6, end, end]), turn(1, 5, result, [7, end])]
    sequences = {name: sequence_of(name, records(name, said)) for name in one.sequences}
    one = GroupRecords(one.offset, one.sealed, one.rewards, sequences)
    (micro,) = materialise(built(one), sequences, LANE.max_staleness)
    assert list(micro.tokens) == [end, 5, 6, end, end, *result, 7, end] * 2
    assert list(micro.mask) == [0, 0, 1, 1, 1, *[0] * len(result), 1, 1] * 2
    lengths = {
        len(getattr(micro, name)) for name in ("tokens", "mask", "logprobs", "versions", "positions", "advantages")
    }
    assert lengths == {2 * (7 + len(result))}


def packed_scores(sequences: dict[str, Sequence]) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of each member of a packed pair under a tiny policy."""
    one = group("a", [1.0, 0.0])
    one = GroupRecords(one.offset, one.sealed, one.rewards, sequences)
    batch = built(one)
    assert [micro.members for micro in batch.layout] == [[0, 1]], "packed together"
    arrays = materialise(batch, sequences, LANE.max_staleness)
    (micro,) = arrays
    assert list(micro.positions) == [*range(len(micro.positions) // 2)] * 2, "positions start again at the border"
    packed = training_batch(arrays)
    logprobs = score(tiny_policy(), packed)
    apart = [score(tiny_policy(), packed.select([number])) for number in range(2)]
    assert np.array_equal(logprobs, np.concatenate(apart)), "as unpacked"
    return logprobs[: micro.starts[1]], logprobs[micro.starts[1] :]


def pair(prefix: list[int], a: list[int], b: list[int]) -> dict[str, Sequence]:
    said = {"a.0": turn(0, 0, prefix, a), "a.1": turn(0, 0, prefix, b)}
    return {name: sequence_of(name, records(name, [one])) for name, one in said.items()}


def test_case_profam_495_packed_rows_do_not_see_each_other() -> None:
    """alex-hh/profam #495; huggingface/nanoVLM #201: one prefix with branches A and B; change one token of A."""
    rng = np.random.default_rng(5)
    prefix, a, b = (rng.integers(TINY.vocab_size, size=n).tolist() for n in (9, 12, 12))
    first_a, first_b = packed_scores(pair(prefix, a, b))
    changed = [(a[0] + 1) % TINY.vocab_size, *a[1:]]
    other_a, other_b = packed_scores(pair(prefix, changed, b))
    assert np.array_equal(first_b, other_b) and not np.array_equal(first_a, other_a)
    alone, again = packed_scores(pair(prefix, b, b))
    assert np.array_equal(alone, again) and np.array_equal(alone, first_b), "its place in the pack does not matter"


@pytest.mark.parametrize("budget", [200, 100])
def test_case_rllm_575_a_row_longer_than_the_budget_keeps_every_action(budget: int) -> None:
    """rllm-org/rllm PR 575: three turns of 40 tokens at a row budget of 200, then of 100: a micro-batch of its own,
    nothing cut."""
    turns = [turn(i, 41 * i, [1], list(range(40))) for i in range(3)]
    one = group("a", [1.0, 0.0])
    sequences = {name: sequence_of(name, records(name, turns)) for name in one.sequences}
    one = GroupRecords(one.offset, one.sealed, one.rewards, sequences)
    small = type(LANE)(**{name: getattr(LANE, name) for name in LANE.__struct_fields__} | {"token_budget": budget})
    chosen = choose([one], small, nobody)
    batch = build(chosen.kept, chosen.dropped, small, 0, AT)
    assert [micro.tokens for micro in batch.layout] == [123, 123]
    arrays = materialise(batch, sequences, LANE.max_staleness)
    assert [sum(micro.mask) for micro in arrays] == [120, 120]
    assert [member.trained_tokens for member in batch.members] == [120, 120]


class UpToTheCap(ScriptedModel):
    """Says the given turns, cut where there is no more room."""

    async def sample(self, *, max_new_tokens: int, **given: Any) -> Completion:  # type: ignore[override]
        whole = await super().sample(**given)
        if len(whole.tokens) <= max_new_tokens:
            return whole
        return replace(
            whole,
            tokens=whole.tokens[:max_new_tokens],
            logprobs=whole.logprobs[:max_new_tokens],
            finish_reason="length",
        )


async def test_case_rllm_575_what_a_turns_cap_allows_is_kept_whole_and_what_the_window_cuts_is_flagged() -> None:
    """The same report, live: no turn is over its cap, all together are; then the window ends inside the third."""
    said = [*[turn_of(template(), ("read_file", {"path": "a"}))] * 2, turn_of(template(), done=True)]

    async def ran(window: int) -> Sequence:
        journal, given = MemoryJournal(), spec({"a": "x"}, max_context_tokens=window, max_turn_tokens=len(said[0]) + 10)
        await runner(journal, UpToTheCap(said), FolderEnvironment(), given).run()
        return sequence_of("s", journal.history("s"))

    whole = await ran(10_000)
    assert (whole.sampled, whole.truncated) == (sum(map(len, said)), False)
    (segment,) = whole.segments
    cut = await ran(len(segment.tokens) - 1)
    assert cut.truncated and cut.segments[0].tokens == segment.tokens[: len(cut.segments[0].tokens)]
    assert sum(map(len, said[:2])) <= cut.sampled < whole.sampled, "no earlier action is lost"


def test_a_session_that_said_nothing_keeps_its_place_in_the_baseline_and_trains_nothing() -> None:
    """It ran out of context before its first turn: no tokens, but a reward."""
    one = group("a", [1.0, 0.0])
    sequences = dict(one.sequences) | {"a.1": sequence_of("a.1", records("a.1", [], reason="context"))}
    one = GroupRecords(one.offset, one.sealed, one.rewards, sequences)
    batch = built(one)
    assert [(m.tokens, m.trained_tokens, m.advantage) for m in batch.members] == [(6, 4, 0.5), (0, 0, -0.5)]
    arrays = training_batch(materialise(batch, sequences, LANE.max_staleness))
    assert arrays.sequences == 1 and arrays.trained_tokens().tolist() == [4]
    assert array("i", arrays.tokens.tolist()) == sequences["a.0"].segments[0].tokens


def test_a_condensed_session_counts_once_in_the_baseline_and_its_reward_covers_every_segment() -> None:
    one = group("a", [1.0, 0.0, 0.0])
    condensed = [
        turn(0, 0, [1, 2], [20, 21]),
        ContextSummarized(segment=1, prompt=i32([1, 2, 9, 3]), cut_after_turn=0),
        turn(1, 4, [4], [40, 41, 42]),
    ]
    sequences = dict(one.sequences) | {"a.0": sequence_of("a.0", records("a.0", condensed))}  # type: ignore[list-item]
    batch = built(GroupRecords(one.offset, one.sealed, one.rewards, sequences))
    third = 1 / 3
    assert [m.advantage for m in batch.members] == pytest.approx([2 * third, -third, -third]), "one reward a session"
    whole = materialise(batch, sequences, LANE.max_staleness)
    arrays = training_batch(whole, owners(batch, sequences))
    assert arrays.sequences == 4 and len(set(arrays.session_of_sequence().tolist())) == 3
    for at in np.flatnonzero(arrays.sessions == 0):
        span = slice(arrays.seq_starts[at], arrays.seq_starts[at + 1])
        assert set(arrays.advantages[span].tolist()) == {batch.members[0].advantage}
    weight = token_weights(arrays, ObjectiveSettings())
    assert set(weight[arrays.loss_mask].tolist()) == {np.float32(1 / 300)}, "three sessions, not four"
