"""Upper directories of overlays, read and merged from the host side.

An upper holds what a sandbox changed: new and changed files as they are, a removed path as a *whiteout* (character
device 0/0), a directory that was removed and made again as an *opaque* one (extended attribute), whose lower content
counts as deleted. `fold_upper` turns that into plain changes against a base tree; `merge_uppers` flattens a stack.
"""

import contextlib
import hashlib
import os
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from odradek.actors.environment.ns.removal import remove_tree

OPAQUE = "user.overlay.opaque"
SETTLED_NS = 50_000_000
"""Nanoseconds after which an unchanged change time proves unchanged content. Too low: two writes within one tick of the
kernel's clock look like one; too high: files are hashed again for nothing."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Node(NamedTuple):
    """A path of the workspace as it is now."""

    kind: Literal["file", "symlink", "dir"]
    mode: int
    digest: str = ""
    target: str = ""
    size: int = 0


class BaseTree:
    """The workspace as the image and its layers make it: immutable, shared by all sandboxes of the same layers."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        self._sorted = sorted(nodes)

    def below(self, path: str) -> list[str]:
        """Paths strictly below `path`."""
        prefix = f"{path}/"
        start = bisect_left(self._sorted, prefix)
        end = start
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return self._sorted[start:end]


class DigestCache:
    """SHA-256 of files that have not changed since they were hashed, by inode and times."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], str] = {}

    def digest(self, parent: int, name: str, info: os.stat_result) -> str:
        key = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        known = self._known.get(key)
        if known is None:
            settled = time.time_ns() - info.st_ctime_ns > SETTLED_NS
            known = hashlib.sha256(read_file(parent, name)).hexdigest()
            if settled:
                self._known[key] = known
        return known


Changes = dict[str, Node | None]
"""Path → what is there now, or None where the base's path is gone. Paths that are as in the base are absent."""


def fold_upper(fd: int, base: BaseTree, changes: Changes, cache: DigestCache, skipped: list[str]) -> None:
    """Add what the upper's workspace directory `fd` says to `changes`, which hold the layers below it."""
    _fold(fd, "", base, changes, cache, skipped)
    for path in [p for p, node in changes.items() if node == base.nodes.get(p)]:
        del changes[path]


def _fold(fd: int, prefix: str, base: BaseTree, changes: Changes, cache: DigestCache, skipped: list[str]) -> None:
    for name in os.listdir(fd):
        path = prefix + name
        try:
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            continue  # removed meanwhile; the next diff sees it
        if not _is_text(path):
            skipped.append(f"{os.fsencode(path)!r}: the name is not UTF-8")
        elif is_whiteout(info):
            _remove(path, base, changes)
        elif stat.S_ISDIR(info.st_mode):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), opened(fd, name, info) as child:
                before = changes[path] if path in changes else base.nodes.get(path)
                if is_opaque(child) or (before is not None and before.kind != "dir"):
                    _remove(path, base, changes)
                changes[path] = Node("dir", stat.S_IMODE(info.st_mode))
                _fold(child, f"{path}/", base, changes, cache, skipped)
        elif stat.S_ISREG(info.st_mode):
            with contextlib.suppress(FileNotFoundError):
                digest = cache.digest(fd, name, info)
                node = Node("file", stat.S_IMODE(info.st_mode), digest=digest, size=info.st_size)
                _replace(path, node, base, changes)
        elif stat.S_ISLNK(info.st_mode):
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(name, dir_fd=fd)
                if not _is_text(target):
                    skipped.append(f"{path}: the link's target is not UTF-8")
                    continue
                _replace(path, Node("symlink", 0, target=target), base, changes)
        else:
            skipped.append(f"{path}: neither file, directory nor link")


def _replace(path: str, node: Node, base: BaseTree, changes: Changes) -> None:
    before = changes[path] if path in changes else base.nodes.get(path)
    if before is not None and before.kind == "dir":
        _remove(path, base, changes)
    changes[path] = node


def _remove(path: str, base: BaseTree, changes: Changes) -> None:
    prefix = f"{path}/"
    for changed in [p for p in changes if p == path or p.startswith(prefix)]:
        del changes[changed]
    for gone in (path, *base.below(path)):
        if gone in base.nodes:
            changes[gone] = None


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, OPAQUE) == b"y"
    except OSError:
        return False


@contextmanager
def opened(parent: int, name: str, info: os.stat_result) -> Iterator[int]:
    """An upper's directory, for the moment also when its owner has closed it to himself."""
    with _unlocked(parent, name, info, 0o500):
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            yield fd
        finally:
            os.close(fd)


def read_file(parent: int, name: str) -> bytes:
    """An upper's regular file."""
    with _unlocked(parent, name, os.stat(name, dir_fd=parent, follow_symlinks=False), 0o400):
        fd = os.open(name, _READ, dir_fd=parent)
    with open(fd, "rb") as file:  # noqa: PTH123
        return file.read()


@contextmanager
def _unlocked(parent: int, name: str, info: os.stat_result, needed: int) -> Iterator[None]:
    mode = stat.S_IMODE(info.st_mode)
    if mode & needed == needed or stat.S_ISLNK(info.st_mode):
        yield
        return
    os.chmod(name, mode | needed, dir_fd=parent)
    try:
        yield
    finally:
        os.chmod(name, mode, dir_fd=parent)


def tree_bytes(fd: int) -> int:
    """Bytes allocated below an open directory."""
    total = 0
    for name in os.listdir(fd):
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            total += info.st_blocks * 512
            if stat.S_ISDIR(info.st_mode):
                with opened(fd, name, info) as child:
                    total += tree_bytes(child)
    return total


def merge_uppers(sources: Sequence[int], target: int, *, link: bool) -> None:
    """Write the stack `sources` (lowest first) into the empty directory `target`, as one upper.

    `link`: files become further names of the same inodes; right where the sources never change again.
    """
    for source in sources:
        _merge(source, target, link)


def _merge(source: int, target: int, link: bool) -> None:
    for name in os.listdir(source):
        info = os.stat(name, dir_fd=source, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            with opened(source, name, info) as child:
                _merge_directory(child, name, stat.S_IMODE(info.st_mode), target, link)
            continue
        remove_tree(name, target)
        if is_whiteout(info):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISREG(info.st_mode) and link:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        elif stat.S_ISREG(info.st_mode):
            _copy(source, name, info, target)


def _merge_directory(child: int, name: str, mode: int, target: int, link: bool) -> None:
    opaque = is_opaque(child)
    try:
        there: os.stat_result | None = os.stat(name, dir_fd=target, follow_symlinks=False)
    except FileNotFoundError:
        there = None
    if there is not None and not stat.S_ISDIR(there.st_mode):
        opaque = True  # what was there, a file or a whiteout, hid what lies below the whole stack
    if there is not None and opaque:
        remove_tree(name, target)
        there = None
    if there is None:
        os.mkdir(name, 0o700, dir_fd=target)
    else:
        os.chmod(name, 0o700, dir_fd=target)
    fd = os.open(name, _DIRECTORY, dir_fd=target)
    try:
        if opaque:
            os.setxattr(fd, OPAQUE, b"y")
        _merge(child, fd, link)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _copy(source: int, name: str, info: os.stat_result, target: int) -> None:
    data = read_file(source, name)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
    with open(fd, "wb") as file:  # noqa: PTH123
        file.write(data)
        file.flush()
        os.fchmod(fd, stat.S_IMODE(info.st_mode))
        os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))
