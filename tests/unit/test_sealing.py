"""The rule of one group, one end (streams/sealing.py), sentence by sentence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odradek.streams.events.groups import (
    GroupDiscarded,
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    MemberReplaced,
    SealedMember,
)
from odradek.streams.events.meta import RecordRef
from odradek.streams.sealing import GroupRule

LANE = "main-0"


def opened(group: str = "g", sessions: tuple[str, ...] = ("a", "b"), lane: str = LANE) -> GroupOpened:
    return GroupOpened(
        group_id=group,
        lane=lane,
        ordinal=0,
        task=RecordRef("tasks.v1", 0, 0),
        task_id="t",
        task_digest="",
        purpose="rl",
        policy="p",
        sessions=list(sessions),
        version=0,
        deadline_ms=0,
    )


def sealed(group: str = "g", sessions: tuple[str, ...] = ("a", "b"), lane: str = LANE) -> GroupSealed:
    members = [SealedMember(session_id=session, status="missing") for session in sessions]
    return GroupSealed(group_id=group, lane=lane, reason="complete", members=members)


def replaced(lost: str, new: str, group: str = "g") -> MemberReplaced:
    return MemberReplaced(group_id=group, lane=LANE, lost_session=lost, new_session=new, cause="ours")


def discarded(group: str = "g") -> GroupDiscarded:
    return GroupDiscarded(group_id=group, lane=LANE, reason="infrastructure")


def taken(*events: GroupEvent) -> list[bool]:
    rule = GroupRule()
    found = [rule.accepts(event) for event in events]
    assert rule.ignored == found.count(False)
    return found


def test_a_second_seal_counts_for_nothing() -> None:
    assert taken(opened(), sealed(), sealed()) == [True, True, False]
    assert taken(opened(), discarded(), sealed()) == [True, True, False]
    assert taken(opened(), sealed(), discarded()) == [True, True, False]


def test_a_group_that_had_its_end_is_not_opened_again() -> None:
    assert taken(opened(), sealed(), opened(), sealed()) == [True, True, False, False]
    assert taken(opened(), opened(sessions=("c", "d")), sealed(sessions=("c", "d")), sealed()) == [
        True,
        False,
        False,
        True,
    ]


def test_a_seal_of_a_group_that_nobody_opened_counts_for_nothing() -> None:
    assert taken(sealed(), opened(), sealed()) == [False, True, True]
    assert taken(opened(lane="other-0"), sealed(), sealed(lane="other-0")) == [True, False, True]


def test_a_seal_of_other_members_counts_for_nothing_and_the_right_one_behind_it_does() -> None:
    for wrong in (("a",), ("a", "b", "c"), ("a", "c"), ("b", "a"), ("a", "a")):
        assert taken(opened(), sealed(sessions=wrong), sealed()) == [True, False, True], wrong


def test_a_replaced_member_is_who_the_seal_must_name() -> None:
    events = (opened(), replaced("a", "a2"), sealed(), sealed(sessions=("a2", "b")))
    assert taken(*events) == [True, True, False, True]
    assert taken(opened(), replaced("x", "y"), replaced("a", "b"), sealed()) == [True, False, False, True]


def test_a_task_may_be_discarded_without_having_been_opened_and_once() -> None:
    assert taken(discarded(), discarded(), opened()) == [True, False, False]


def test_a_group_names_each_member_once() -> None:
    assert taken(opened(sessions=("a", "a")), sealed(sessions=("a", "a"))) == [False, False]


EVENTS = st.one_of(
    st.just(LaneConfigured(lane=LANE, policy="p", groups_per_batch=1, attempts=2, max_staleness=1)),
    st.builds(opened, st.sampled_from("gh"), st.sampled_from([("a", "b"), ("c", "d"), ("a", "a")])),
    st.builds(sealed, st.sampled_from("gh"), st.sampled_from([("a", "b"), ("c", "d"), ("a", "e")])),
    st.builds(replaced, st.sampled_from("abc"), st.sampled_from("de"), st.sampled_from("gh")),
    st.builds(discarded, st.sampled_from("gh")),
)


@given(st.lists(EVENTS, max_size=30))
def test_a_group_is_batched_at_most_once_whatever_lies_on_the_lane(events: list[GroupEvent]) -> None:
    rule = GroupRule()
    ends = [e.group_id for e in events if rule.accepts(e) and isinstance(e, GroupSealed | GroupDiscarded)]
    assert len(ends) == len(set(ends))
