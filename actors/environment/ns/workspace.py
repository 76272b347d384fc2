"""What changed in a sandbox's workspace, found from its overlay's upper directories.

A `Tracker` belongs to one sandbox. It knows the tree that image and layers make (`BaseTree`), what the frozen uppers
below change (`below`), and what was last reported (`reported`); a scan reads only the live upper, so a diff costs what
was changed, not what is there. Synchronous; runs in the driver's file threads.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.environment.ns.overlay import BaseTree, Changes, DigestCache, Node, fold_upper, opened, read_file
from odradek.sandbox_images.store import WORKSPACE_PREFIX
from odradek.sandbox_images.tree import TreeEntry

MAX_DELTA_BYTES = 512 * 1024 * 1024
"""Bytes of file content in one delta. Too low: legitimate build output is refused; too high: one call fills memory."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def base_tree(manifests: Iterable[Sequence[TreeEntry]]) -> BaseTree:
    """The workspace that layers make, lowest first."""
    nodes: dict[str, Node] = {}
    prefix = WORKSPACE_PREFIX + "/"
    for manifest in manifests:
        for entry in manifest:
            if not entry.path.startswith(prefix):
                continue
            path = entry.path[len(prefix) :]
            before = nodes.get(path)
            if before is not None and before.kind == "dir" and entry.kind != "dir":
                for gone in [p for p in nodes if p.startswith(path + "/")]:
                    del nodes[gone]
            nodes[path] = Node(entry.kind, entry.mode, entry.digest, entry.target, entry.size)
    return BaseTree(nodes)


def changed(old: Changes, new: Changes, base: BaseTree) -> list[tuple[str, Node | None]]:
    """What leads from `old` to `new`, both relative to `base`; of a deleted subtree only the top."""

    def at(changes: Changes, path: str) -> Node | None:
        return changes[path] if path in changes else base.nodes.get(path)

    found: list[tuple[str, Node | None]] = []
    for path in sorted(old.keys() | new.keys()):
        node = at(new, path)
        if node == at(old, path):
            continue
        if node is None:
            parent, _, _ = path.rpartition("/")
            above = at(new, parent) if parent else None
            if parent and (above is None or above.kind != "dir"):
                continue  # went with its parent
        found.append((path, node))
    return found


class Tracker:
    """Scans and diffs of one sandbox."""

    def __init__(self, base: BaseTree, below: Changes, cache: DigestCache) -> None:
        self.base = base
        self.below = below
        self.reported: Changes = dict(below)
        self._cache = cache

    def scan(self, upper: int) -> tuple[Changes, list[str]]:
        """Everything that differs from the base now, and what can't be said of it. `upper`: the live upper."""
        changes, skipped = dict(self.below), list[str]()
        try:
            fd = os.open(WORKSPACE_PREFIX, _DIRECTORY, dir_fd=upper)
        except FileNotFoundError:
            return changes, skipped  # nothing in the workspace was touched
        try:
            fold_upper(fd, self.base, changes, self._cache, skipped)
        finally:
            os.close(fd)
        return changes, skipped

    def diff(self, uppers: Sequence[int], read_base: Callable[[str], bytes], incremental: bool) -> Delta:
        """The delta; `uppers` is the whole stack, the live one first."""
        now, skipped = self.scan(uppers[0])
        entries: list[DeltaEntry] = []
        total = 0
        for path, node in changed(self.reported if incremental else {}, now, self.base):
            if node is None:
                entries.append(DeltaEntry(path, "delete"))
            elif node.kind == "file":
                data = _read(path, uppers) if path in now else read_base(path)
                total += len(data)
                if total > MAX_DELTA_BYTES:
                    raise SandboxInfraError(f"the workspace's changes exceed {MAX_DELTA_BYTES} bytes at {path!r}")
                digest = hashlib.sha256(data).hexdigest()
                if path in now:  # a running command may have written since the scan: what was read is what is said
                    now[path] = node._replace(digest=digest, size=len(data))
                entries.append(DeltaEntry(path, "file", node.mode, len(data), digest, data))
            else:
                entries.append(DeltaEntry(path, node.kind, node.mode, target=node.target))
        if incremental:
            self.reported = now
        return Delta(tuple(entries), tuple(skipped))


def _read(path: str, uppers: Sequence[int]) -> bytes:
    for upper in uppers:
        with suppress(FileNotFoundError, NotADirectoryError):
            return _read_below(upper, f"{WORKSPACE_PREFIX}/{path}")
    raise SandboxInfraError(f"workspace file {path!r} vanished during the diff; retry")


def _read_below(root: int, path: str) -> bytes:
    *parents, name = path.split("/")
    with ExitStack() as stack:
        fd = root
        for part in parents:
            fd = stack.enter_context(opened(fd, part, os.stat(part, dir_fd=fd, follow_symlinks=False)))
        return read_file(fd, name)


def base_reader(layers_fd: int, layers: Sequence[str]) -> Callable[[str], bytes]:
    """Reads a file of the base: from the topmost layer that has it. `layers_fd`: the store's directory of layers."""

    def read(path: str) -> bytes:
        for layer in reversed(layers):
            with suppress(FileNotFoundError, NotADirectoryError):
                return _read_below(layers_fd, f"{layer}/tree/{WORKSPACE_PREFIX}/{path}")
        raise SandboxInfraError(f"workspace file {path!r} is in no layer of the image; the store was changed")

    return read
