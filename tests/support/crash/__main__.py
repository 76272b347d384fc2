"""`python -m support.crash --faults N [--seed S] [--report FILE.md] [--data DIR] [--kinds a,b]` (`make crash N=...`).

Exit code 0 if every guarantee held, 1 if one did not, 130 if it was ended by SIGINT, SIGTERM or SIGHUP: then, too,
everything is stopped in order. The report is written after every round. The data folder is removed afterwards, unless
something failed or one was named; what a killed run left is ended by the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from pathlib import Path

from odradek.infra.stack.testing import scratch, stop_as_on_interrupt
from support.crash.outcome import Outcome, Settings
from support.crash.plan import WEIGHTS, plan
from support.crash.report import State, as_json, as_page, write
from support.crash.run import run

PLANNED = ("trainer", "session-0", "environment-0", "controller")
"""Whom `--plan` shows a plan for."""


def main() -> int:
    """Exit code: 0 all guarantees held, 1 one did not, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m support.crash", description="Hurt a running job, check what held.")
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="where to write the page (Markdown; JSON beside it)")
    parser.add_argument("--data", type=Path, help="folder of the stack; kept")
    parser.add_argument("--kinds", default="", help=f"comma separated, of: {', '.join(WEIGHTS)}")
    parser.add_argument("--set", dest="flags", action="append", default=[], help="a setting, as for odradek")
    parser.add_argument("--plan", action="store_true", help="print the plan for four actors and exit")
    options = parser.parse_args()
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    if unknown := set(kinds) - WEIGHTS.keys():
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    if options.plan:
        for faults in plan(options.seed, options.faults, PLANNED, kinds):
            print("; ".join(map(str, faults)))
        return 0
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is killed is no news here
    stop_as_on_interrupt()
    with contextlib.ExitStack() as ending:
        data = options.data or ending.enter_context(scratch())
        settings = Settings(options.faults, options.seed, data, kinds, tuple(options.flags))
        try:
            outcome = _told(settings, options.report)
        except Exception:
            _keep(data, options.data)
            raise
        if outcome is None:
            return 130
        if outcome.violations:
            _keep(data, options.data)
        return 1 if outcome.violations else 0


def _keep(data: Path, named: Path | None) -> None:
    """What failed is there to be looked at."""
    if named is None:
        kept = Path(tempfile.mkdtemp(prefix="odr-crash-")) / "d"
        print(f"kept: {data.rename(kept)}", file=sys.stderr)


def _told(settings: Settings, report: Path | None) -> Outcome | None:
    """The run's outcome, with the report written as it goes; None if somebody ended it."""
    began = time.monotonic()
    latest = Outcome()

    def so_far(outcome: Outcome, state: State = "under way") -> None:
        nonlocal latest
        latest = outcome
        if report is not None:
            write(as_json(settings, outcome, "checked" if outcome.checked else state), report)

    try:
        outcome = run(settings, lambda text: print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True), so_far)
    except BaseException as error:
        so_far(latest, "interrupted")
        print(f"interrupted after {len(latest.injected)} faults; nothing was checked", file=sys.stderr)
        if isinstance(error, KeyboardInterrupt):
            return None
        raise
    print(as_page(as_json(settings, outcome)))
    return outcome


if __name__ == "__main__":
    sys.exit(main())
