"""What a verifier's reward file may say, and what a session's conduct is worth: pure parts of the reward room."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.assembly_world import records, turn

from odradek.actors.reward import combine
from odradek.actors.reward.efficiency import conduct_of
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.verifier import reward_of
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    FileChange,
    SessionCompleted,
    SessionEvent,
    ToolCompleted,
    ToolRequested,
    WorkspaceDelta,
)
from odradek.streams.ownership import SessionRecord


@pytest.mark.parametrize(
    ("text", "reward"),
    [("0", 0.0), ("1\n", 1.0), (" 0.25 ", 0.25), ('{"reward": 0.5, "lint": 1}', 0.5), ("1e-3", 0.001)],
)
def test_a_number_from_0_to_1_is_a_reward(text: str, reward: float) -> None:
    assert reward_of(text, 0) == reward


@pytest.mark.parametrize(
    "text",
    [
        *["", "  \n", "NaN", "Infinity", "-Infinity", "-0.1", "1.01", "true", "pass", '"1"', "[1]", "0 1", "null"],
        *['{"reward": "1"}', '{"reward": NaN}', '{"score": 1}', "1" * 400, "[" * 100_000],
    ],
    ids=range(18),
)
def test_case_agent_lightning_308_anything_else_is_ungraded_with_its_cause(text: str) -> None:
    """microsoft/agent-lightning #308; Minions-Land/MagentaBenchmark #37: no reward, an empty file or NaN is never 0."""
    with pytest.raises(GraderCouldNotRun) as raised:
        reward_of(text, 3)
    cause = raised.value.cause
    assert "ended with 3 and wrote no reward" in cause if not text.strip() else "expected 0 to 1" in cause
    assert not raised.value.retryable, "the same verifier would do the same"


def test_an_exit_code_alone_never_passes() -> None:
    with pytest.raises(GraderCouldNotRun, match="ended with 0 and wrote no reward"):
        reward_of("", 0)


def test_the_cause_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(GraderCouldNotRun("no disk", retryable=False)))
    assert (error.cause, error.retryable) == ("no disk", False)


# -- the combination ------------------------------------------------------------------------------------------------


def test_each_turn_costs_a_share_and_parallel_calls_cost_nothing_more() -> None:
    assert combine.total({"solved": 1.0, "turns": 2.0, "errors": 0.0}) == pytest.approx(1 - 2 * combine.TURN_COST)
    assert combine.total({"solved": 0.0, "turns": 9.0, "errors": 0.0}) == 0.0


@given(st.floats(0, 1), st.integers(0, 12), st.integers(0, 100))
def test_a_total_is_finite_and_solving_never_costs(solved: float, turns: int, errors: int) -> None:
    parts = {"turns": float(turns), "errors": float(errors)}
    total = combine.total({"solved": solved, **parts})
    floor = -combine.ERROR_COST * combine.MAX_ERRORS
    assert floor - 1e-9 <= combine.total({"solved": 0.0, **parts}) <= total <= 1.0


# -- conduct ----------------------------------------------------------------------------------------------------------


def session(*bodies: SessionEvent) -> list[SessionRecord]:
    """One owner's records: opened, one turn, then `bodies`, then the end."""
    head = records("s", [turn(0, 0, [1], [2, 3], [(0, 4), (1, 5)])])
    end, opened = head.pop(), head[0]
    for seq, body in enumerate(bodies, start=1):
        head.append((opened[0] + 1 + seq, f"s/{seq}", Meta(epoch=opened[0], seq=seq), body))
    seq = len(bodies) + 1
    return [*head, (opened[0] + 1 + seq, "s/end", Meta(epoch=opened[0], seq=seq), end[3])]


def asked(index: int, name: str) -> ToolRequested:
    return ToolRequested(call_id=f"0.{index}", turn=0, index=index, name=name, arguments={}, effect="pure")


def done(index: int, *, error: bool = False, path: str = "") -> ToolCompleted:
    delta = WorkspaceDelta(changes=[FileChange(path=path, kind="file", content=b"x")]) if path else None
    return ToolCompleted(call_id=f"0.{index}", turn=0, index=index, text="", is_error=error, delta=delta)


def test_conduct_counts_turns_calls_errors_and_gathers_deltas_in_order() -> None:
    made = conduct_of(
        session(
            asked(0, "read_file"), asked(1, "edit_file"), asked(2, "run_terminal"),
            done(0), done(1, path="a"), done(2, error=True, path="b"),
        )
    )  # fmt: skip
    assert (made.turns, made.calls, made.errors, made.parallel_turns) == (1, 3, 1, 1)
    assert [change.path for delta in made.deltas for change in delta.changes] == ["a", "b"]
    assert made.reads_before_edit is True
    assert (made.sampled_tokens, made.versions) == (2, [4, 5])
    assert isinstance(made.end, SessionCompleted) and (made.first_offset, made.last_offset) == (0, 8)


@pytest.mark.parametrize(
    ("calls", "seen"), [(["edit_file", "read_file"], False), (["grep"], None), (["grep", "write_file"], False)]
)
def test_an_edit_without_a_read_before_it_is_seen(calls: list[str], seen: bool | None) -> None:
    assert conduct_of(session(*[asked(i, name) for i, name in enumerate(calls)])).reads_before_edit is seen


def test_a_zombies_calls_count_for_nothing() -> None:
    rows = session(asked(0, "edit_file"), done(0, path="a"))
    zombie = (rows[-1][0], "zombie", Meta(epoch=-5, seq=2), done(1, error=True, path="evil"))
    made = conduct_of([*rows[:-1], zombie, rows[-1]])
    assert made.errors == 0 and [c.path for d in made.deltas for c in d.changes] == ["a"]
