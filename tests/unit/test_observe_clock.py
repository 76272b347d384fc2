"""Order and windows follow the log, whatever a sender's clock says."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.infra.observe.clock import TOLERANCE_MS, LogClock, settle
from odradek.infra.observe.fold import RunFold
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned

START = 1_790_000_000_000
MINUTE = 60_000
YEAR = 365 * 86_400_000


def test_case_agentglass_245_two_wrong_stamps_are_flagged_and_18_keep_their_windows() -> None:
    stamps = [START + 20_000 * i for i in range(20)]
    honest = Counter(stamp // MINUTE for i, stamp in enumerate(stamps) if i not in (5, 12))
    stamps[5] += YEAR
    stamps[12] -= 120 * MINUTE
    fold = RunFold()
    for offset, stamp in enumerate(stamps):
        fold.apply(RecordRef("rewards.v1", 0, offset), f"e{offset}", Meta(), _verdict(offset), stamp)
    clock = fold.clocks["rewards.v1", 0]
    assert [(s.ref.offset, s.flag) for s in fold.suspects()] == [(5, "ahead"), (12, "behind")]
    times = [clock.time(i) for i in range(20)]
    assert times == sorted(times)  # the order of the log
    assert Counter(t // MINUTE for i, t in enumerate(times) if i not in (5, 12)) == honest
    assert all(times[i] == stamps[i] for i in range(20) if i not in (5, 12))
    assert (times[5], times[12]) == (stamps[4], stamps[11])
    assert list(fold.verdicts) == [f"s{i}" for i in range(20)]


def _verdict(number: int) -> RewardAssigned:
    return RewardAssigned(
        session_id=f"s{number}", group_id="g", partition=0, first_offset=0, last_offset=1, grader="g",
        grader_version="1", components={}, total=0.0,
    )  # fmt: skip


def test_a_wrong_first_and_a_wrong_last_stamp_are_flagged_too() -> None:
    stamps = [START + YEAR, *(START + 1000 * i for i in range(5)), START + 2 * YEAR]
    times, flags = settle(stamps, reader_ms=START + MINUTE)
    assert flags == {0: "ahead", 6: "ahead"}
    assert (times[0], times[6]) == (START, START + 4000)


def test_a_night_without_events_is_no_wrong_clock() -> None:
    stamps = [START, START + 10, START + 9 * 3_600_000, START + 9 * 3_600_000 + 5]
    assert settle(stamps, reader_ms=stamps[-1]) == (stamps, {})


def test_writers_that_race_within_the_tolerance_are_believed() -> None:
    stamps = [START, START + 500, START + 300, START + 900, START + 850]
    assert settle(stamps) == (stamps, {})


def test_nothing_and_one_record_have_their_own_time() -> None:
    assert settle([]) == ([], {})
    assert settle([START]) == ([START], {})
    assert settle([START], reader_ms=START - YEAR)[1] == {0: "ahead"}


def test_a_clock_that_grows_is_settled_again() -> None:
    clock = LogClock("t", 0)
    first = clock.add(0, START + YEAR)
    assert clock.time(first) == START + YEAR  # nothing contradicts it yet
    for offset in range(1, 4):
        clock.add(offset, START + offset)
    assert clock.time(first) == START + 1
    assert [suspect.flag for suspect in clock.suspects()] == ["ahead"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 50_000), min_size=12, max_size=40),
    st.sets(st.integers(3, 8), min_size=1, max_size=2),
    st.integers(2 * TOLERANCE_MS, YEAR),
    st.booleans(),
)
def test_a_minority_of_wrong_clocks_never_moves_an_honest_record(
    steps: list[int], wrong: set[int], shift: int, ahead: bool
) -> None:
    """Wrong ones are fewer than the honest before and after them; else nobody can say which are which."""
    honest, now = [], START + YEAR
    for step in steps:
        now += step
        honest.append(now)
    span = honest[-1] - honest[0]
    shift += span  # further off than the whole run is long, so that being wrong is unmistakable
    stamps = [t + (shift if ahead else -shift) if i in wrong else t for i, t in enumerate(honest)]
    times, flags = settle(stamps, reader_ms=honest[-1])
    assert set(flags) == wrong
    assert all(times[i] == honest[i] for i in range(len(honest)) if i not in wrong)
