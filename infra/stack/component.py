"""What every embedded component offers to the stack, and the one way to wait until it is ready.

A component is started once, has a real health check (it asks the service, not the process table), and is ended by its
mark. It keeps no state of its own: ports and processes are in the stack's state file.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from odradek.infra.deadline import Deadline
from odradek.infra.errors import ComponentFailed, Unreachable
from odradek.infra.stack.ports import refused
from odradek.infra.stack.processes import POLL_S, log_tail

SAY_S = 3.0
"""Seconds between two lines of progress of one component; three start at the same time."""

WORDS = 300
"""Characters of an error log's line that are quoted: its end, where the cause is."""

Progress = Callable[[str, str], None]
"""Called with (component, what happens now) whenever something takes a while."""


class Component(Protocol):
    """One service of the stack, bound to a data folder."""

    @property
    def name(self) -> str:
        """The component's name in state, messages and configuration."""

    @property
    def port_names(self) -> tuple[str, ...]:
        """The ports it listens on."""

    @property
    def start_deadline_s(self) -> float:
        """Seconds from start to the first good health check."""

    @property
    def stop_grace_s(self) -> float:
        """Seconds it may take to end by itself before it is killed."""

    @property
    def error_logs(self) -> Mapping[Path, Path]:
        """Files whose first line, if there is one, says what its processes died of; by each where it lies after
        `clean`."""

    @property
    def detaches(self) -> bool:
        """Whether `start` returns a starter that ends with 0 once the service runs on its own."""

    def prepare(self, ports: Mapping[str, int], progress: Progress) -> None:
        """Everything that can fail before a process exists: programs, jars, disk layout."""

    def start(self, ports: Mapping[str, int], mark: str, log: Path) -> subprocess.Popen[bytes]:
        """Start it; returns the process that must stay alive (or, for a starter, end with 0)."""

    def address(self, ports: Mapping[str, int]) -> str:
        """What clients connect to."""

    def check(self, ports: Mapping[str, int], timeout_s: float) -> None:
        """Ask the service itself; raises `Unreachable` with the reason."""

    def listens(self, ports: Mapping[str, int]) -> tuple[int | Path, ...]:
        """Loopback ports and sockets on which it listens for as long as it lives."""

    def finish(self, ports: Mapping[str, int]) -> None:
        """What must exist once it answers (a bucket, say). Idempotent."""

    def clean(self, ports: Mapping[str, int]) -> None:
        """Remove what its processes leave outside the data folder, once none of them lives."""


def wait_ready(
    component: Component, ports: Mapping[str, int], process: subprocess.Popen[bytes], log: Path, progress: Progress
) -> None:
    """Until the health check passes; an early end (of the process, or of what listened) or the deadline is an error
    that quotes the log."""
    deadline = Deadline(component.start_deadline_s)
    said, listened = 0, set[int | Path]()
    reason = "nothing listens yet"
    while True:
        code = process.poll()
        if code is not None and not (code == 0 and component.detaches):
            raise ComponentFailed(f"{component.name} ended with exit code {code}: {_words(component, log)}")
        if code is None and component.detaches:
            reason = "its starter still runs"
        else:
            try:
                component.check(ports, timeout_s=min(5.0, max(0.5, deadline.remaining)))
                return
            except Unreachable as error:
                reason = str(error)
        for where in component.listens(ports) if component.detaches else ():
            if not refused(where):
                listened.add(where)
            elif where in listened:
                raise ComponentFailed(
                    f"{component.name} died while it was starting (nothing listens on {where} any more): "
                    f"{_words(component, log)}"
                )
        if deadline.expired:
            raise ComponentFailed(
                f"{component.name} was not ready within {deadline.seconds:.0f} s ({reason}): {_words(component, log)}"
            )
        if deadline.elapsed >= said + SAY_S:
            said = int(deadline.elapsed)
            progress(component.name, f"starting, {said} s ({reason})")
        time.sleep(POLL_S * 2)


def _words(component: Component, log: Path) -> str:
    """What it said last, in one line, and where."""
    for file, kept in component.error_logs.items():
        with suppress(OSError):
            said = file.read_text(errors="replace").strip().splitlines()
            if said:
                return f"{said[0][-WORDS:]}; log: {kept}"
    return f"{log_tail(log)}; log: {log}"
