"""Free loopback ports for the stack: the ones of the last run when they are still free, else new ones.

Ports are chosen just before their owner starts; another program may still take one in between. Then the component
ends with the reason in its log and `up` says so; a second `up` chooses anew.

New ones lie outside the range that the kernel gives to outgoing connections (Linux, ip-sysctl, `ip_local_port_range`).
From that range any connection may be given the port of a service that is being started again; that service would come
back elsewhere, and whoever knew its address would wait for ever.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from odradek.infra.deadline import Deadline

LOOPBACK = "127.0.0.1"
"""The only address that the embedded stack listens on."""

FIRST, LAST = 20_000, 65_535
"""Between these new ports are chosen. Below them are the ports of well-known programs and those of Ray's workers."""
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
FREE_S, POLL_S = 5.0, 0.05
"""Seconds for a port of the last run to become free, and between two looks: whoever had it may be on its way out. Too
low moves a service whose address others hold; too high delays a start where another program has taken the port."""
ATTEMPTS = 200
"""Ports tried before the kernel is left to choose one: somebody uses nearly all of them."""


def is_free(port: int) -> bool:
    """Whether a listener could take the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _becomes_free(port: int) -> bool:
    deadline = Deadline(FREE_S)
    while not is_free(port):
        if deadline.expired:
            return False
        time.sleep(POLL_S)
    return True


def choose(names: Sequence[str], previous: Mapping[str, int]) -> dict[str, int]:
    """One distinct free port for each name; a previous one is kept if nobody took it."""
    chosen: dict[str, int] = {}
    with ExitStack() as held:
        for name in names:
            before = previous.get(name)
            if before is not None and before not in chosen.values() and _becomes_free(before):
                chosen[name] = before
                continue
            chosen[name] = _hold_new(held.enter_context(socket.socket()))
    return chosen


def _hold_new(probe: socket.socket) -> int:
    """Bind the socket to a new port."""
    low, high = _outgoing()
    usable = [port for port in range(FIRST, LAST + 1) if not low <= port <= high]
    for port in random.sample(usable, min(ATTEMPTS, len(usable))):
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            continue
        return port
    probe.bind((LOOPBACK, 0))
    return int(probe.getsockname()[1])


def _outgoing() -> tuple[int, int]:
    try:
        low, high = OUTGOING.read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(low), int(high)


def answers(port: int, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def refused(where: int | Path) -> bool:
    """Whether certainly nothing listens on that port or socket. One that is too busy to answer is not refused."""
    family = socket.AF_INET if isinstance(where, int) else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect((LOOPBACK, where) if isinstance(where, int) else str(where))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False
