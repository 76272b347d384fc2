"""Control groups: limits for a sandbox as a whole, where this host lets us set them.

`find` looks for a place under which groups can be made: with cgroup v2 the nearest ancestor of our own group that is
writable and hands the controllers down; with v1 (root only) one directory in each controller's tree. None means that
only the weaker limits exist here, and a spec that insists on `cgroup` is refused.
"""

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from odradek.actors.environment.ns.removal import remove_cgroups

Controller = Literal["memory", "pids", "cpu"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "pids", "cpu")
SHARED = "odradek"
"""Group of all drivers of this host; the last one to close removes it."""

MAKE_ATTEMPTS = 5
"""Too low: a driver that starts while others end seems to have no cgroups; more than a few never happen in a row."""

CPU_PERIOD_US = 100_000
"""Period of the CPU quota, the kernel's own default. Shorter: more switching; longer: visible stalls when throttled."""


class Place(NamedTuple):
    """Where groups may be made. v2 has one parent for all controllers, v1 one for each."""

    version: Literal[1, 2]
    parents: dict[Controller, Path]

    def only(self, controllers: Iterable[Controller]) -> "Place":
        """The same with some controllers: in v1 each one more is another group to make and enter."""
        return Place(self.version, {controller: self.parents[controller] for controller in controllers})

    def below(self, name: str) -> "Place":
        return Place(self.version, {controller: parent / name for controller, parent in self.parents.items()})

    def paths(self, name: str) -> list[Path]:
        """The directories of one group, without repetition."""
        return list(dict.fromkeys(parent / name for parent in self.parents.values()))


def find(mountinfo: str, own: str) -> Place | None:
    """A usable place, given the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    groups = dict(_own_groups(own))
    parents: dict[Controller, Path] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        root, mountpoint = fields[3], Path(fields[4])
        if kind[0] == "cgroup2":
            place = _find_v2(mountpoint, root, groups.get("", "/"))
            if place is not None:
                return place
        for controller in CONTROLLERS:
            if kind[0] == "cgroup" and controller in kind[2].split(","):
                directory = _below(mountpoint, root, groups.get(controller, "/"))
                if os.access(directory, os.W_OK):
                    parents[controller] = directory
    return Place(1, parents) if len(parents) == len(CONTROLLERS) and os.geteuid() == 0 else None


def _own_groups(own: str) -> list[tuple[str, str]]:
    found = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        found += [(controller, path) for controller in controllers.split(",")]
    return found


def _below(mountpoint: Path, root: str, group: str) -> Path:
    relative = os.path.relpath(group, root)
    return mountpoint if relative.startswith("..") else mountpoint / relative


def _find_v2(mountpoint: Path, root: str, group: str) -> Place | None:
    directory = _below(mountpoint, root, group)
    while True:
        try:
            handed_down = set((directory / "cgroup.subtree_control").read_text().split())
        except OSError:
            return None
        if handed_down >= set(CONTROLLERS) and os.access(directory, os.W_OK):
            return Place(2, dict.fromkeys(CONTROLLERS, directory))
        if directory == mountpoint:
            return None
        directory = directory.parent


def make_parent(place: Place, name: str, owner: int) -> Place:
    """A group for one driver below the group `odradek`; the place below it.

    Both belong to the sandbox user, so that the zygote can remove the driver's when the driver is killed. Tried again
    when another driver's end removes the shared group at this very moment.
    """
    for attempt in range(MAKE_ATTEMPTS):
        try:
            _make_groups(place, name, owner)
            break
        except FileNotFoundError:
            if attempt == MAKE_ATTEMPTS - 1:
                raise
    return place.below(f"{SHARED}/{name}")


def _make_groups(place: Place, name: str, owner: int) -> None:
    for group in (SHARED, f"{SHARED}/{name}"):
        for path in place.paths(group):
            path.mkdir(exist_ok=True)
            if place.version == 2:
                (path / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in CONTROLLERS))
            if os.geteuid() == 0:
                os.chown(path, owner, owner)


def remove_parent(ours: Place) -> list[str]:
    """Remove a driver's own group, and the shared one if it was the last; returns what is still in use."""
    paths = [str(path) for path in ours.paths("")]
    return remove_parents(paths)


def remove_parents(paths: list[str], patience_s: float = 0.0) -> list[str]:
    """The same for groups by path."""
    left = remove_cgroups(paths, patience_s)
    for path in paths:
        with contextlib.suppress(OSError):
            Path(path).parent.rmdir()
    return left


def kill_members(paths: list[str]) -> None:
    """Kill every process in these groups and those below. For groups whose driver is dead."""
    for path in paths:
        for members in Path(path).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                for pid in members.read_text().split():
                    os.kill(int(pid), signal.SIGKILL)


def make_group(place: Place, name: str, limits: dict[Controller, float]) -> None:
    """A sandbox's group with its limits, before any process is in it."""
    for path in place.only(limits).paths(name):
        path.mkdir()
    for controller, amount in limits.items():
        for file, value in _settings(place.version, controller, amount):
            (place.parents[controller] / name / file).write_text(value)


def _settings(version: int, controller: Controller, amount: float) -> list[tuple[str, str]]:
    if controller == "pids":
        return [("pids.max", str(int(amount)))]
    if controller == "memory":
        if version == 2:
            return [("memory.max", str(int(amount))), ("memory.oom.group", "0")]
        return [("memory.limit_in_bytes", str(int(amount)))]
    quota = str(int(amount * CPU_PERIOD_US))
    if version == 2:
        return [("cpu.max", f"{quota} {CPU_PERIOD_US}")]
    return [("cpu.cfs_period_us", str(CPU_PERIOD_US)), ("cpu.cfs_quota_us", quota)]


def enter(place: Place, name: str, pid: int, limits: dict[Controller, float]) -> None:
    """Put a process, and with it all that it will start, into the group. Takes milliseconds: the kernel waits until no
    processor is in the middle of a fork.
    """
    for path in place.only(limits).paths(name):
        (path / "cgroup.procs").write_text(str(pid))


def memory_bytes(place: Place, name: str) -> int | None:
    """Memory used by the group now."""
    file = "memory.current" if place.version == 2 else "memory.usage_in_bytes"
    try:
        return int((place.parents["memory"] / name / file).read_text())
    except (OSError, ValueError):
        return None
