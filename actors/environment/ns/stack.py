"""The overlay stack of a sandbox: its live upper, the frozen uppers below, and the layers of its image.

Frozen uppers are shared between forks and counted; the last user removes them. A stack of `MAX_FROZEN` is flattened
into one. Synchronous; runs in the driver's file threads, except `mount_paths`.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from odradek.actors.environment.delta import Delta
from odradek.actors.environment.ns.instance import Instance
from odradek.actors.environment.ns.overlay import BaseTree, Changes, DigestCache, merge_uppers, tree_bytes
from odradek.actors.environment.ns.removal import remove_tree
from odradek.actors.environment.ns.workspace import Tracker

MAX_FROZEN = 64
"""Frozen uppers in one stack. The kernel's mount options end near 200 layers (4 KiB). Too low: copies; too high: each
file look-up walks all layers."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Frozen:
    """One frozen upper of the instance and how many stacks and snapshots hold it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holders = 0


class FrozenStack(NamedTuple):
    """What a snapshot keeps: frozen uppers, lowest first, and what they change."""

    frozen: tuple[Frozen, ...]
    changes: Changes


class FrozenStore:
    """All frozen uppers of one driver."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def new(self) -> Frozen:
        with self._lock:
            return Frozen(f"f/{next(self._numbers)}")

    def hold(self, frozen: Sequence[Frozen]) -> None:
        with self._lock:
            for one in frozen:
                one.holders += 1

    def release(self, frozen: Sequence[Frozen]) -> None:
        with self._lock:
            for one in frozen:
                one.holders -= 1
        for one in frozen:
            if one.holders == 0:
                remove_tree(one.name, self._instance.fd)


class Stack:
    """The stack of one sandbox. `read_base` returns a workspace file of the image by its path."""

    def __init__(
        self,
        sandbox_id: str,
        instance: Instance,
        store: FrozenStore,
        layers: Sequence[str],
        base: BaseTree,
        read_base: Callable[[str], bytes],
        cache: DigestCache,
        below: FrozenStack | None,
    ) -> None:
        self._instance = instance
        self._store = store
        self._layers = layers
        self._read_base = read_base
        self._directory = f"s/{sandbox_id}"
        self._frozen: tuple[Frozen, ...] = below.frozen if below is not None else ()
        store.hold(self._frozen)
        self._tracker = Tracker(base, below.changes if below is not None else {}, cache)

    def mount_paths(self) -> dict[str, str | list[str]]:
        """What init mounts, as the zygote names it (`state/…`, `images/…`), topmost lower first."""
        state = f"state/{self._instance.name}"
        lower = [f"{state}/{one.name}" for one in reversed(self._frozen)]
        lower += [f"images/{layer}/tree" for layer in reversed(self._layers)]
        upper = f"{state}/{self._directory}"
        return {"lower": lower, "upper": f"{upper}/u", "work": f"{upper}/w", "mountpoint": f"{state}/m"}

    def make(self) -> None:
        """Empty upper and work directories."""
        for part in (self._directory, f"{self._directory}/u", f"{self._directory}/w"):
            os.mkdir(part, 0o755, dir_fd=self._instance.fd)

    def remove(self) -> None:
        remove_tree(self._directory, self._instance.fd)
        self._store.release(self._frozen)
        self._frozen = ()

    def diff(self, incremental: bool) -> Delta:
        with ExitStack() as opened:
            uppers = [self._open(f"{self._directory}/u", opened)]
            uppers += [self._open(one.name, opened) for one in reversed(self._frozen)]
            return self._tracker.diff(uppers, self._read_base, incremental)

    def settle(self) -> None:
        """What is there now counts as reported."""
        with ExitStack() as opened:
            self._tracker.reported, _ = self._tracker.scan(self._open(f"{self._directory}/u", opened))

    def disk_bytes(self) -> int:
        """Bytes that this sandbox alone occupies: its live upper."""
        with ExitStack() as opened:
            return tree_bytes(self._open(f"{self._directory}/u", opened))

    def copy_upper(self) -> FrozenStack:
        """Freeze a copy of the upper; this stack stays as it is."""
        copy = self._store.new()
        with ExitStack() as opened:
            upper = self._open(f"{self._directory}/u", opened)
            os.mkdir(copy.name, 0o755, dir_fd=self._instance.fd)
            merge_uppers([upper], self._open(copy.name, opened), link=False)
            changes, _ = self._tracker.scan(self._open(copy.name, opened))
        return FrozenStack(self._flattened((*self._frozen, copy)), changes)

    def freeze_upper(self) -> FrozenStack:
        """Freeze the upper itself; nothing may be using it. This stack goes on above it with an empty one."""
        with ExitStack() as opened:
            changes, _ = self._tracker.scan(self._open(f"{self._directory}/u", opened))
        top = self._store.new()
        fd = self._instance.fd
        os.rename(f"{self._directory}/u", top.name, src_dir_fd=fd, dst_dir_fd=fd)
        remove_tree(self._directory, fd)
        self.make()
        before = self._frozen
        self._frozen = self._flattened((*before, top))
        self._store.hold(self._frozen)
        self._store.release(before)
        self._tracker.below = changes
        return FrozenStack(self._frozen, changes)

    def _flattened(self, frozen: tuple[Frozen, ...]) -> tuple[Frozen, ...]:
        if len(frozen) < MAX_FROZEN:
            return frozen
        flat = self._store.new()
        os.mkdir(flat.name, 0o755, dir_fd=self._instance.fd)
        with ExitStack() as opened:
            target = self._open(flat.name, opened)
            merge_uppers([self._open(one.name, opened) for one in frozen], target, link=True)
        self._store.hold(frozen)
        self._store.release(frozen)  # removes those that only this call knew
        return (flat,)

    def _open(self, name: str, opened: ExitStack) -> int:
        fd = os.open(name, _DIRECTORY, dir_fd=self._instance.fd)
        opened.callback(os.close, fd)
        return fd
