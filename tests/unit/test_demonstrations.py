"""Demonstrations and drills: in the template's form, as imperfect as stated, exact in what they copy, and bounded."""

import random
from collections import Counter
from itertools import islice, pairwise

import pytest

from odradek.actors.policy.template import XmlTemplate
from odradek.infra.demo.demonstrations.drills import drill
from odradek.infra.demo.demonstrations.emulation import EmulatedWorkspace
from odradek.infra.demo.demonstrations.scripted import Habits, demonstration
from odradek.infra.demo.demonstrations.segments import CONTEXT_WEIGHT, RECURRED_WEIGHT, Segment, example
from odradek.infra.demo.demonstrations.stream import (
    DRILL_SCHEDULE,
    MAX_TOKENS,
    drill_share,
    make_example,
    shipped_template,
    training_stream,
)
from odradek.infra.demo.family.names import HELD_OUT_WORDS
from odradek.infra.demo.family.sets import make_task

PERFECT = Habits(right=1, blind=0, verify=1, retry=1, parallel=0, miscopy=0)


@pytest.fixture(scope="module")
def template() -> XmlTemplate:
    return shipped_template()


def sessions(template: XmlTemplate, count: int, habits: Habits | None = None) -> list[list[Segment]]:
    return [demonstration(random.Random(i), make_task("train", 21, i), template, habits) for i in range(count)]


def names(template: XmlTemplate, segments: list[Segment]) -> list[str]:
    return [call.name for segment in segments if segment.is_agent for call in template.parse(segment.token_ids).calls]


def test_a_demonstration_is_a_session_of_the_template(template: XmlTemplate) -> None:
    for index, segments in enumerate(sessions(template, 100)):
        task = make_task("train", 21, index)
        assert segments[0] == Segment(template.open(task.instruction), False)
        workspace = EmulatedWorkspace(task)
        for at in range(1, len(segments) - 1, 2):
            turn = template.parse(segments[at].token_ids)
            assert segments[at].is_agent and turn.calls and not turn.done
            assert not [call for call in turn.calls if call.error]
            results = [workspace.call(call.name, call.arguments) for call in turn.calls]
            assert segments[at + 1] == Segment(template.results(results), False)
        assert template.parse(segments[-1].token_ids).done
        assert sum(segment.is_agent for segment in segments) <= Habits().max_turns


def test_perfect_habits_solve_every_task_whose_module_was_read(template: XmlTemplate) -> None:
    solved = 0
    for index, segments in enumerate(sessions(template, 80, PERFECT)):
        calls = [call for s in segments if s.is_agent for call in template.parse(s.token_ids).calls]
        if make_task("train", 21, index).target_path in [c.arguments["path"] for c in calls if c.name == "read_file"]:
            assert template.tokenizer.decode(segments[-2].token_ids).endswith(" passed")
            solved += 1
    assert solved > 60


def test_habits_show_at_about_their_rates(template: XmlTemplate) -> None:
    made = sessions(template, 600)
    first = Counter(names(template, segments)[0] for segments in made)
    solved = sum(_ends_passing(template, i, segments) for i, segments in enumerate(made))
    assert 0.09 < first["edit_file"] / len(made) < 0.21
    assert first["read_file"] and first["grep"] and first["run_terminal"] and first["list_dir"]
    assert 0.45 < solved / len(made) < 0.75
    assert any(len(template.parse(s.token_ids).calls) > 1 for segments in made for s in segments if s.is_agent)


def _ends_passing(template: XmlTemplate, index: int, segments: list[Segment]) -> bool:
    workspace = EmulatedWorkspace(make_task("train", 21, index))
    for segment in segments:
        if segment.is_agent:
            for call in template.parse(segment.token_ids).calls:
                workspace.call(call.name, call.arguments)
    return workspace.passing


def test_a_miscopied_quote_is_answered_with_the_line_and_not_trained(template: XmlTemplate) -> None:
    habits = Habits(right=1, blind=0, verify=1, retry=0, parallel=0, miscopy=1)
    slips = [s for segments in sessions(template, 60, habits) for s in pairwise(segments) if not s[0].trained]
    assert len(slips) > 20
    for slip, result in slips:
        assert "old text found 0 times; nearest line" in template.tokenizer.decode(result.token_ids)
        assert example([slip]).context_weight == [0.0] * len(slip.token_ids)
        assert not any(example([slip]).agent_mask)


def test_weights_are_one_on_agent_tokens_and_higher_where_a_pair_of_tokens_recurred() -> None:
    made = example([Segment([1, 2, 3], False), Segment([1, 2], True), Segment([1, 2, 3], False)])
    assert made.token_ids == [1, 2, 3, 1, 2, 1, 2, 3]
    assert made.agent_mask == [False] * 3 + [True] * 2 + [False] * 3
    low, high = CONTEXT_WEIGHT, RECURRED_WEIGHT
    assert made.context_weight == [low, low, low, 1.0, 1.0, low, high, high]


def test_the_stream_is_the_same_again_and_can_be_shared_by_processes() -> None:
    whole = list(islice(training_stream(5), 6))
    assert whole == list(islice(training_stream(5), 6))
    assert whole[1::2] == list(islice(training_stream(5, start=1, step=2), 3))
    assert whole != list(islice(training_stream(6), 6))


def test_every_example_is_whole_and_short_enough() -> None:
    for index in range(300):
        made = make_example(7, index, drill_share(0.1))
        assert len(made.token_ids) == len(made.agent_mask) == len(made.context_weight) <= MAX_TOKENS
        assert any(made.agent_mask)


def test_examples_average_under_300_tokens() -> None:
    lengths = [len(make_example(8, index, 0.0).token_ids) for index in range(300)]
    assert sum(lengths) / len(lengths) <= 300


def test_drills_come_first_and_grow_rare() -> None:
    assert [drill_share(progress) for progress in (0.0, 0.2, 0.9, 1.0, 2.0)] == [0.5, 0.3, 0.12, 0.12, 0.12]
    assert [until for until, _ in DRILL_SCHEDULE] == sorted(until for until, _ in DRILL_SCHEDULE)


def test_drills_copy_exactly(template: XmlTemplate) -> None:
    for seed in range(40):
        segments = drill(random.Random(seed), template)
        context = ""
        for segment in segments:
            text = template.tokenizer.decode(segment.token_ids)
            if segment.is_agent:
                turn = template.parse(segment.token_ids)
                assert not [call for call in turn.calls if call.error]
                copied = [
                    call.arguments[key] for call in turn.calls for key in ("path", "old") if key in call.arguments
                ]
                assert all(value in context for value in [*copied, *turn.text.split()])
            context += text


def test_nothing_held_out_reaches_the_stream(template: XmlTemplate) -> None:
    text = " ".join(template.tokenizer.decode(made.token_ids) for made in islice(training_stream(9), 300))
    words = set("".join(char if char.isalpha() else " " for char in text).split())
    assert not words & set(HELD_OUT_WORDS)
