"""What a deployment has on this host, asked of the kernel: processes, mounts, control groups, sandboxes on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from odradek.actors.environment.ns.cgroup import SHARED
from odradek.actors.environment.ns.preflight import find_cgroups


def processes_of(data: Path) -> list[int]:
    """Live processes that name the data folder in command line, environment or working directory; never this one."""
    wanted, found = os.fsencode(data), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
            continue
        with contextlib.suppress(OSError):
            told = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and (wanted in told or str(data) in str((entry / "cwd").readlink())):
                found.append(int(entry.name))
    return found


def instances(data: Path) -> set[str]:
    """Names of the sandbox drivers that have state below the data folder now."""
    return {lock.stem for lock in (data / "sandboxes").glob("*/ns-*.lock")}


def held(data: Path) -> list[str]:
    """Every sandbox that a driver of this deployment has a record of: it was made and is not yet gone."""
    return sorted(f"sandbox {record}" for record in (data / "sandboxes").glob("*/ns-*/records/*"))


def left_behind(data: Path, known: set[str]) -> list[str]:
    """Whatever of the deployment is still on the host. `known`: driver instances seen while it ran, whose control
    groups must be gone too."""
    left = [f"process {pid}: {command_of(pid)}" for pid in processes_of(data)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    left += [f"mount {line.split()[4]}" for line in mounts if str(data) in line]
    left += [f"sandbox state {path}" for path in sorted((data / "sandboxes").glob("*/ns-*"))]
    place = find_cgroups()
    for parent in set(place.parents.values()) if place is not None else ():
        left += [f"control group {parent / SHARED / name}" for name in known if (parent / SHARED / name).exists()]
    return left


def command_of(pid: int) -> str:
    """The command line of a process, as short as a report wants it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:160]
    except OSError:
        return "gone"


def program_of(pid: int) -> str:
    """The name of the program that a process runs, cut to 15 characters by the kernel; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def children_of(pid: int) -> list[int]:
    """Direct children of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found
