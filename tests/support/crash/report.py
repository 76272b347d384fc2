"""A run as JSON and as the page that is committed: machine, date, code, seed, faults, a verdict for each guarantee.

Written after every round as well: of a run that was killed half way it says how far it was, and that
nothing was checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from odradek.infra.stack.jars import read_lock
from support.crash.checks import CHECKS, GUARANTEES
from support.crash.outcome import Outcome, Settings

State = Literal["under way", "interrupted", "checked"]
GIT_S = 10
SHOWN = 20
"""Violations of one guarantee that the page lists; the JSON holds all."""


def as_json(settings: Settings, outcome: Outcome, state: State = "checked") -> dict[str, Any]:
    """Everything, for tools. `date` is when it was written."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
        "state": state,
        "seed": settings.seed,
        "faults": len(outcome.injected),
        "asked": settings.faults,
        "kinds": dict(Counter(fault.kind for fault in outcome.injected).most_common()),
        "seconds": round(outcome.seconds),
        "rounds": [asdict(one) for one in outcome.rounds],
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


@cache
def commit() -> str:
    """The code that ran, as `git describe` has it; `+` for what is not committed."""
    place = Path(__file__).parent
    described = ["git", "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(described, cwd=place, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


@cache
def versions() -> dict[str, str]:
    """Of Python, of what bears the run, and of the broker."""
    found = {"python": platform.python_version()}
    for name in ("odradek", "ray", "aiokafka", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"kafka": next(jar.version for jar in read_lock() if jar.artifact == "kafka-clients")}


def as_page(told: dict[str, Any]) -> str:
    """Markdown."""
    by_guarantee: dict[str, list[str]] = {}
    for violation in told["violations"]:
        by_guarantee.setdefault(violation["guarantee"], []).append(f"{violation['check']}: {violation['what']}")
    checked = told["state"] == "checked"
    lines = [
        f"# {told['faults']} faults, seed {told['seed']}" + ("" if checked else f": {told['state']}"),
        "",
        f"{told['date']}, {told['machine']}; {told['seconds'] / 60:.0f} minutes. Repeat: "
        f"`make crash N={told['asked']} SEED={told['seed']}`.",
        "",
        f"Code: {told['commit']}; {', '.join(f'{name} {version}' for name, version in told['versions'].items())}.",
        "",
        *([] if checked else [f"{told['faults']} of {told['asked']} faults; no guarantee was checked.", ""]),
        _pace(told["rounds"]),
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
        *(
            _row(name, number, len(by_guarantee.get(name, [])) if checked else None)
            for name, number in GUARANTEES.items()
            if _checks(name)
        ),
        "",
        f"{len(told['skipped'])} faults found nothing to hit or did not reach their point; "
        f"{len(told['duplicates'])} records were delivered twice.",
    ]
    for name, found in by_guarantee.items():
        lines += ["", f"## {name}: {len(found)} violations", "", *(f"- {what}" for what in found[:SHOWN])]
    return "\n".join(lines) + "\n"


def _checks(name: str) -> list[str]:
    return [check.__name__ for guarantee, check in CHECKS if guarantee == name]


def _row(name: str, number: int, broken: int | None) -> str:
    title = f"{number}. {name}" if number else name
    verdict = "not checked" if broken is None else f"{broken} violations" if broken else "holds"
    return f"| {title} | {', '.join(_checks(name))} | {verdict} |"


def _pace(rounds: list[dict[str, Any]]) -> str:
    faults = sum(one["faults"] for one in rounds)
    if not faults:
        return "No round of faults is over."
    hurt, going_on = (sum(one[what] for one in rounds) for what in ("hurt", "going_on"))
    return (
        f"{len(rounds)} rounds, {(hurt + going_on) / faults:.1f} s a fault: {hurt / len(rounds):.0f} s a round until "
        f"its faults were over, {going_on / len(rounds):.0f} s until the job was seen to go on."
    )


def write(told: dict[str, Any], path: Path) -> None:
    """The page at `path`, the JSON beside it; each whole or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place, text in ((path, as_page(told)), (path.with_suffix(".json"), json.dumps(told, indent=1) + "\n")):
        half = place.with_name(f".{place.name}.half")
        half.write_text(text)
        half.replace(place)
