"""The closing table of a demo says what its numbers are of."""

from __future__ import annotations

from odradek.infra.demo.family.sets import EVALUATION_SETS
from odradek.infra.demo.run import DemoOutcome
from odradek.infra.demo.summary import as_json, as_text
from odradek.infra.observe.fold import Conduct


def outcome(begun_at: int) -> DemoOutcome:
    first, last = ({name: Conduct(sessions=40, solved=n) for name in EVALUATION_SETS} for n in (10, 20))
    return DemoOutcome(first=first, last=last, final_version=37, begun_at=begun_at)


def test_a_run_that_went_on_from_an_earlier_one_says_so() -> None:
    again = outcome(27)
    assert "went on from version 27 of an earlier one" in as_text(again)
    assert as_json(again)["begun_at"] == 27
    assert "earlier" not in as_text(outcome(0))
