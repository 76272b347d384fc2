"""`python -m support.crash --faults N [--seed S] [--report FILE.md] [--data DIR] [--kinds a,b]` (`make crash N=...`).

Exit code 0 if every guarantee held, 1 if one did not. The data folder is removed afterwards, unless something failed or
one was named.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from support.crash.plan import WEIGHTS, plan
from support.crash.report import as_json, as_page, write
from support.crash.run import Settings, run

PLANNED = ("trainer", "session-0", "environment-0", "controller")
"""Whom `--plan` shows a plan for."""


def main() -> int:
    """Exit code: 0 all guarantees held, 1 one did not, 2 wrong usage."""
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
        for faults in plan(
            options.seed, options.faults, ["trainer", "session-0", "environment-0", "controller"], kinds
        ):
            print("; ".join(map(str, faults)))
        return 0
    data = options.data or Path(tempfile.mkdtemp(prefix="odr-crash-"))
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is killed is no news here
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # so that whoever ends the run leaves nothing behind
    began = time.monotonic()
    settings = Settings(options.faults, options.seed, data, kinds, tuple(options.flags))
    outcome = run(settings, lambda text: print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True))
    told = as_json(settings, outcome)
    print(as_page(told))
    if options.report is not None:
        write(told, options.report)
    if outcome.violations:
        print(f"kept: {data}", file=sys.stderr)
    elif options.data is None:
        shutil.rmtree(data, ignore_errors=True)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
