"""What a demo run showed, for a person and for a program. Numbers come from the log; each rate has its interval."""

from __future__ import annotations

from collections import Counter
from typing import Any

from odradek.infra.demo.audit import line
from odradek.infra.demo.family.sets import EVALUATION_SETS, TaskSet
from odradek.infra.demo.intervals import wilson
from odradek.infra.demo.run import DemoOutcome
from odradek.infra.observe.fold import Conduct


def as_json(outcome: DemoOutcome) -> dict[str, Any]:
    """Everything in one value."""
    fold = outcome.fold
    return {
        "begun_at": outcome.begun_at,
        "final_version": outcome.final_version,
        "sampled": {"first": _sets(outcome.first), "last": _sets(outcome.last)},
        "greedy": {"first": _sets(outcome.greedy_first), "last": _sets(outcome.greedy_last)},
        "versions_published": len(fold.published),
        "versions_reloaded": {replica: len(versions) for replica, versions in fold.loaded.items()},
        "groups": {"sealed": fold.sealed, "discarded": dict(fold.discarded), "dropped": dict(fold.dropped)},
        "steps": len(fold.steps),
        "rebuilt": str(outcome.rebuild),
        "audit": _audit(outcome),
        "events": dict(fold.events + outcome.session_events),
    }


def _sets(results: dict[TaskSet, Conduct]) -> dict[str, Any]:
    return {
        name: {
            "solved": conduct.solved,
            "tasks": conduct.sessions,
            "rate": conduct.solve_rate,
            "interval95": wilson(conduct.solved, conduct.sessions),
            "reads_before_edit": conduct.read_before_edit_rate,
            "parallel_turns": conduct.parallel_rate,
        }
        for name, conduct in results.items()
    }


def as_text(outcome: DemoOutcome) -> str:
    """The closing table."""
    fold = outcome.fold
    gone_on = [f"This run went on from version {outcome.begun_at} of an earlier one; all numbers are of both."]
    lines = [
        "",
        *(gone_on if outcome.begun_at else []),
        f"Held-out solve rates, sampled at temperature 1 (95 % interval), version 0 -> {outcome.final_version}",
        *_table(outcome.first, outcome.last),
    ]
    if outcome.greedy_last:
        lines += ["Greedy", *_table(outcome.greedy_first, outcome.greedy_last)]
    before, after = (_all(results) for results in (outcome.first, outcome.last))
    lines += [
        f"Reads before the first edit: {before.read_before_edit_rate:.2f} -> {after.read_before_edit_rate:.2f}; "
        f"turns with parallel calls: {before.parallel_rate:.2f} -> {after.parallel_rate:.2f}",
        f"Weight versions published: {len(fold.published)}; reloaded by "
        + ", ".join(f"{name}: {len(versions)}" for name, versions in sorted(fold.loaded.items())),
        f"Groups sealed: {fold.sealed}; discarded: {_reasons(fold.discarded)}; "
        f"left out of batches: {_reasons(fold.dropped)}",
        f"Batches rebuilt from the log: {outcome.rebuild}",
        *([line(outcome.audit)] if outcome.audit is not None else []),
        "Events by type:",
    ]
    counts = fold.events + outcome.session_events
    lines += [f"  {count:8d}  {kind}" for kind, count in sorted(counts.items())]
    return "\n".join(lines)


def _audit(outcome: DemoOutcome) -> dict[str, Any] | None:
    if (report := outcome.audit) is None:
        return None
    return {
        "ok": report.ok,
        "verified": report.verified,
        "not_anchored": report.not_anchored,
        "findings": [str(finding) for finding in report.findings],
    }


def _table(first: dict[TaskSet, Conduct], last: dict[TaskSet, Conduct]) -> list[str]:
    return [f"  {name:20s} {_rate(first[name])}  ->  {_rate(last[name])}" for name in EVALUATION_SETS]


def _reasons(counts: Counter[str]) -> str:
    """`flat`: all rewards of the group were equal, so that it teaches nothing."""
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common()) or "none"


def _rate(conduct: Conduct) -> str:
    low, high = wilson(conduct.solved, conduct.sessions)
    return f"{100 * conduct.solve_rate:5.1f} % ({100 * low:.0f}-{100 * high:.0f}, n={conduct.sessions})"


def _all(results: dict[TaskSet, Conduct]) -> Conduct:
    total = Conduct()
    for conduct in results.values():
        for field in Conduct.__slots__:
            setattr(total, field, getattr(total, field) + getattr(conduct, field))
    return total
