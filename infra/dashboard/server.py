"""The MLflow server: on loopback, on a free port, with a store that is made afresh from the log each time.

Guarantees: `serving` leaves no process behind, however its block ends; what a killed one left is ended by the next
`serving` of the same data folder, and by `odradek down` (its processes carry the stack's mark).
"""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from odradek.infra.dashboard.errors import DashboardError
from odradek.infra.deadline import Deadline
from odradek.infra.stack import processes
from odradek.infra.stack.ports import LOOPBACK, choose
from odradek.infra.stack.state import stack_id

START_S = 120.0
"""Seconds for the server to answer: it imports for 10 on an idle core."""
STOP_S = 20.0
"""Seconds for its processes to end; they are killed after half of it."""
LOOK_S = 0.3
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens loopback addresses, never through a proxy."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
}
"""No usage statistics, no job workers (seven idle processes)."""

Say = Callable[[str], None]


@contextmanager
def serving(program: Path, data: Path, say: Say, port: int | None = None) -> Iterator[str]:
    """The base address of a server with an empty store below `data`/dashboard."""
    mark = f"{stack_id(data)}/dashboard"
    folder = data / "dashboard"
    _end(mark)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = port or choose(["dashboard"], {})["dashboard"]
    command = [
        str(program), "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "files"),
    ]  # fmt: skip
    log = folder / "server.log"
    try:
        child = processes.spawn(command, mark=mark, log=log, cwd=folder, env=QUIET)
        address = f"http://{LOOPBACK}:{port}"
        deadline = Deadline(START_S)
        say("starting MLflow …")
        while not _answers(f"{address}/health"):
            if child.poll() is not None or deadline.expired:
                raise DashboardError(f"dashboard: MLflow did not start: {processes.log_tail(log)} (log: {log})")
            time.sleep(LOOK_S)
        yield address
    finally:
        _end(mark)


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(mark: str) -> None:
    left = processes.end_all(lambda: processes.marked(mark), Deadline(STOP_S), STOP_S / 2)
    if left:
        raise DashboardError(f"dashboard: processes {[name.pid for name in left]} did not end within {STOP_S:g} s")
