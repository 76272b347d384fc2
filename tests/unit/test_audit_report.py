"""What people read of an audit: `audit verify` and the demo's closing line."""

from __future__ import annotations

import pytest

from odradek.infra.cli.audit import SHOWN, as_text
from odradek.infra.demo.audit import line
from odradek.streams.audit.check import Finding
from odradek.streams.audit.verify import AuditReport, PartitionVerdict

KEY = "ab" * 32


def report(findings: int = 0, rounds: int = 2, **more: object) -> AuditReport:
    found = [
        Finding(topic="sessions.v1", partition=n, offset=7, kind="changed", detail="another one")
        for n in range(findings)
    ]
    partitions = [
        PartitionVerdict(topic="sessions.v1", partition=n, verified=3, not_anchored=1, finding=None)
        for n in range(max(1, findings))
    ]
    values = {"not_kept": 0, "locked": True} | more
    return AuditReport(
        deployment="d", rounds=rounds, keys=[KEY], findings=found, partitions=partitions, **values  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_good_log_is_one_line() -> None:
    expected = f"3 records verified in 2 rounds, 1 not yet anchored; signed by {KEY[:16]}"
    assert as_text(report()) == expected
    assert as_text(report(not_kept=1, locked=False)) == (
        f"{expected}; 1 rounds are not in the bucket yet; the bucket has no object lock"
    )
    assert line(report()) == "Audit: 3 records anchored, 1 not yet; the chain verifies"


def test_findings_come_first_and_a_flood_of_them_is_cut() -> None:
    lines = as_text(report(SHOWN + 2)).splitlines()
    assert lines[0] == "sessions.v1/0@7: changed: another one"
    assert lines[SHOWN] == "… and 2 more (--json)"
    assert lines[-1].startswith("22 of 22 partitions are not as they were signed; ")
    assert len(lines) == SHOWN + 2
    assert "NOT as it was signed" in line(report(1))


@pytest.mark.parametrize("findings", [0, 1])
def test_nothing_anchored_is_never_called_good(findings: int) -> None:
    nothing = report(findings, rounds=0)
    assert not nothing.ok
    assert as_text(nothing).endswith("records: does a notary run?")
    assert "the chain verifies" not in line(nothing)
