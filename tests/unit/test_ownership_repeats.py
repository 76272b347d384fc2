"""Takeovers that are on the log twice: an append whose acknowledgement was lost is repeated, and the first may land
before the second or after it."""

from __future__ import annotations

import pytest

from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import EnvironmentClosed, SessionOpened, SessionResumed
from odradek.streams.ownership import SessionRecord, accepted

OPENED = SessionOpened(session_id="s", policy="p")
RESUMED = SessionResumed(session_id="s")


def said(offset: int, epoch: int, seq: int) -> SessionRecord:
    """Any event of an owner."""
    return offset, f"step {epoch} {seq}", Meta(epoch=epoch, seq=seq), EnvironmentClosed(sandbox_id="box")


def offsets(*records: SessionRecord) -> list[int]:
    return [offset for offset, *_ in accepted(records)]


@pytest.mark.parametrize("acknowledged", [0, 1])
def test_an_opening_written_twice_is_one_epoch_under_either_offset(acknowledged: int) -> None:
    records = [(0, "a", Meta(), OPENED), (1, "a", Meta(), OPENED)]
    assert offsets(*records, said(2, acknowledged, 0), said(3, acknowledged, 1)) == [0, 2, 3]


def test_a_repeated_opening_that_lands_late_takes_nothing_over() -> None:
    """Else the owner's later records would count for nothing, and it would never know."""
    records = [(0, "a", Meta(), OPENED), said(1, 0, 0), (2, "a", Meta(), OPENED)]
    assert offsets(*records, said(3, 0, 1)) == [0, 1, 3]


def test_a_repeated_opening_of_a_former_owner_takes_nothing_back() -> None:
    records = [(0, "a", Meta(), OPENED), (1, "b", Meta(), RESUMED), (2, "a", Meta(), OPENED)]
    assert offsets(*records, said(3, 0, 0), said(4, 2, 0), said(5, 1, 0)) == [0, 1, 5]


def test_the_newest_owner_wins_whatever_its_predecessors_repeat() -> None:
    records = [
        (0, "a", Meta(), OPENED),
        (1, "b", Meta(), RESUMED),
        (2, "c", Meta(), RESUMED),
        (3, "b", Meta(), RESUMED),
    ]
    assert offsets(*records, said(4, 1, 0), said(5, 3, 0), said(6, 2, 0)) == [0, 1, 2, 6]
