"""A run as JSON and as the page that is committed: machine, date, seed, faults, a verdict for each guarantee."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.crash.checks import CHECKS, GUARANTEES
from support.crash.run import Outcome, Settings

SHOWN = 20
"""Violations of one guarantee that the page lists; the JSON holds all."""


def as_json(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    """Everything, for tools."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "seed": settings.seed,
        "faults": len(outcome.injected),
        "asked": settings.faults,
        "kinds": dict(Counter(fault.kind for fault in outcome.injected).most_common()),
        "seconds": round(outcome.seconds),
        "counts": outcome.counts,
        "skipped": outcome.skipped,
        "duplicates": outcome.duplicates,
        "violations": [violation._asdict() for violation in outcome.violations],
        "plan": [fault.to_json() for fault in outcome.injected],
    }


def machine() -> str:
    """Processor, cores and memory, in one line."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores of {model}, {memory:.0f} GiB, Linux {platform.release()}"


def as_page(told: dict[str, Any]) -> str:
    """Markdown."""
    by_guarantee: dict[str, list[str]] = {}
    for violation in told["violations"]:
        by_guarantee.setdefault(violation["guarantee"], []).append(f"{violation['check']}: {violation['what']}")
    lines = [
        f"# {told['faults']} faults, seed {told['seed']}",
        "",
        f"{told['date']}, {told['machine']}; {told['seconds'] / 60:.0f} minutes. Repeat: "
        f"`make crash N={told['asked']} SEED={told['seed']}`.",
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in told["kinds"].items()),
        "",
        "| seen on the log | |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in told["counts"].items()),
        "",
        "| guarantee | checks | verdict |",
        "|---|---|---|",
        *(_row(name, number, len(by_guarantee.get(name, []))) for name, number in GUARANTEES.items() if _checks(name)),
        "",
        f"{len(told['skipped'])} faults found nothing to hit or did not reach their point; "
        f"{len(told['duplicates'])} records were delivered twice.",
    ]
    for name, found in by_guarantee.items():
        lines += ["", f"## {name}: {len(found)} violations", "", *(f"- {what}" for what in found[:SHOWN])]
    return "\n".join(lines) + "\n"


def _checks(name: str) -> list[str]:
    return [check.__name__ for guarantee, check in CHECKS if guarantee == name]


def _row(name: str, number: int, broken: int) -> str:
    title = f"{number}. {name}" if number else name
    return f"| {title} | {', '.join(_checks(name))} | {f'{broken} violations' if broken else 'holds'} |"


def write(told: dict[str, Any], path: Path) -> None:
    """The page at `path`, the JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_page(told))
    path.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
