"""Host-side access to a sandbox's workspace, without starting a process and without ever leaving it.

All paths are walked one component at a time from an open directory, each opened without following links; a link is read
and its target walked in turn, inside the sandbox's own tree. So a path is either inside the workspace, or refused: a
race with a command inside can at worst reach another file of the same sandbox. Reading a FIFO or a device never blocks:
only regular files are opened.

Every method is synchronous, belongs in one of the driver's file threads, which act as the sandbox's user, and is called
under `held`.
"""

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

from odradek.actors.environment.delta import DeltaEntry
from odradek.actors.environment.errors import SandboxGoneError, SandboxInfraError, SandboxPathError
from odradek.actors.environment.ns.removal import remove_tree
from odradek.actors.environment.protocol import WORKSPACE, FileStat

MAX_LINKS = 40
"""Links followed in one path, as the kernel does. Too low: deep link farms are refused; too high: only slower loops."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_TRAVERSE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Place(NamedTuple):
    """Where a path ended: an open parent, the last name in it, its path without links. `by_link`: the path's last part
    is a link; so if nothing is there, the link dangles.
    """

    parent: int
    name: str
    path: str
    info: os.stat_result | None
    by_link: bool


class WorkspaceFiles:
    """The workspace behind one open directory. After `close` it is closed as soon as no call uses it any more: closed
    under a running call, its number could come to mean another sandbox's directory.
    """

    def __init__(self, workspace: int) -> None:
        self._root = workspace
        self._lock = threading.Lock()
        self._calls = 0
        self._closed = False

    def close(self) -> None:
        with self._lock:
            unused = not self._closed and self._calls == 0
            self._closed = True
        if unused:
            os.close(self._root)

    @contextmanager
    def held(self) -> Iterator["WorkspaceFiles"]:
        """For the duration of one or more of the calls below."""
        with self._lock:
            if self._closed:
                raise SandboxGoneError("the sandbox's files are closed")
            self._calls += 1
        try:
            yield self
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closed and self._calls == 0
            if last:
                os.close(self._root)

    def read(self, path: str, offset: int, limit: int | None) -> bytes:
        with self._resolved(path) as place:
            self._regular(place, path)
            with _translated(path):
                fd = os.open(place.name, _READ, dir_fd=place.parent)
            with open(fd, "rb") as file:  # noqa: PTH123
                file.seek(offset)
                return file.read(-1 if limit is None else limit)

    def write(self, path: str, data: bytes, mode: int | None) -> FileStat:
        with self._resolved(path, make_parents=True) as place:
            if place.info is None and place.by_link:
                raise SandboxPathError(
                    f"{path!r} is a link to a file that does not exist; write to the target's own path"
                )
            if place.info is not None:
                self._regular(place, path)
            kept = mode if mode is not None else 0o644 if place.info is None else stat.S_IMODE(place.info.st_mode)
            with _translated(path):
                _write_file(place.parent, place.name, data, kept)
                info = os.stat(place.name, dir_fd=place.parent, follow_symlinks=False)
            return _file_stat(place.path, info, "")

    def stat(self, path: str, follow: bool) -> FileStat:
        with self._resolved(path, follow=follow) as place:
            if place.info is None:
                raise SandboxPathError(f"{path!r} does not exist")
            return _stat_at(place.parent, place.name, place.path, place.info)

    def entries(self, path: str, recursive: bool) -> tuple[FileStat, ...]:
        with self._resolved(path) as place:
            if place.info is None or not stat.S_ISDIR(place.info.st_mode):
                raise SandboxPathError(f"{path!r} is not a directory")
            with _translated(path):
                fd = os.open(place.name, _DIRECTORY, dir_fd=place.parent)
            try:
                prefix = f"{place.path}/" if place.path else ""
                return tuple(sorted(_entries(fd, prefix, recursive), key=lambda entry: entry.path))
            finally:
                os.close(fd)

    def download(self, path: str) -> dict[str, bytes]:
        found = self.stat(path, True)
        if found.kind != "dir":
            return {found.path: self.read(path, 0, None)}
        names = [entry.path for entry in self.entries(path, True) if entry.kind == "file"]
        return {name: self.read(name, 0, None) for name in names}

    def apply(self, entries: list[DeltaEntry], contents: Mapping[str, bytes]) -> None:
        """Carry out delta entries in the order given; `contents` has the bytes that they lack, by digest."""
        modes: dict[str, int] = {}
        for entry in entries:
            parent, _, name = entry.path.rpartition("/")
            with _translated(entry.path), _done_if_absent(entry), self._opened(parent, modes) as fd:
                self._apply_one(fd, name, entry, contents, modes)
        for path in sorted(modes, reverse=True):  # children first: a parent's mode may close the way to them
            parent, _, name = path.rpartition("/")
            with _translated(path), self._opened(parent, {}) as fd, contextlib.suppress(FileNotFoundError):
                os.chmod(name, modes[path], dir_fd=fd)

    def _apply_one(
        self, fd: int, name: str, entry: DeltaEntry, contents: Mapping[str, bytes], modes: dict[str, int]
    ) -> None:
        try:
            kind = stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            kind = None
        if kind is not None and not (entry.kind == "dir" and kind == stat.S_IFDIR):
            if kind == stat.S_IFDIR:
                for path in [p for p in modes if p == entry.path or p.startswith(entry.path + "/")]:
                    del modes[path]
            remove_tree(name, fd)
        if entry.kind == "dir":
            if kind != stat.S_IFDIR:
                os.mkdir(name, 0o700, dir_fd=fd)
            modes[entry.path] = entry.mode
        elif entry.kind == "symlink":
            os.symlink(entry.target, name, dir_fd=fd)
        elif entry.kind == "file":
            data = entry.content if entry.content is not None else contents[entry.digest]
            _write_file(fd, name, data, entry.mode)

    @contextmanager
    def _opened(self, path: str, modes: dict[str, int]) -> Iterator[int]:
        """A directory by its literal path. One closed to its owner is opened for the time being; `modes` remembers."""
        fd = os.dup(self._root)
        walked = ""
        try:
            for part in path.split("/") if path else ():
                walked = f"{walked}/{part}" if walked else part
                mode = stat.S_IMODE(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode)
                if mode & 0o700 != 0o700:
                    modes.setdefault(walked, mode)
                    os.chmod(part, mode | 0o700, dir_fd=fd)
                deeper = os.open(part, _TRAVERSE, dir_fd=fd)
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def _regular(place: Place, path: str) -> None:
        if place.info is None:
            raise SandboxPathError(f"{path!r} does not exist")
        if stat.S_ISDIR(place.info.st_mode):
            raise SandboxPathError(f"{path!r} is a directory")
        if not stat.S_ISREG(place.info.st_mode):
            raise SandboxPathError(f"{path!r} is not a regular file")

    @contextmanager
    def _resolved(self, path: str, *, follow: bool = True, make_parents: bool = False) -> Iterator[Place]:
        opened: list[int] = []
        try:
            with _translated(path):
                place = self._resolve(path, opened, follow, make_parents)
            yield place
        finally:
            for fd in opened:
                os.close(fd)

    def _resolve(self, path: str, opened: list[int], follow: bool, make_parents: bool) -> Place:
        pending = deque(_inside(path, path))
        stack: list[tuple[str, int]] = [("", self._root)]
        links, by_link = 0, False
        while pending:
            part = pending.popleft()
            if part == "..":
                if len(stack) > 1:
                    stack.pop()
                elif not pending or pending.popleft() != WORKSPACE.strip("/"):
                    raise SandboxPathError(f"{path!r} leaves the workspace")
                continue
            parent = stack[-1][1]
            walked = "/".join([name for name, _ in stack[1:]] + [part])
            try:
                info = os.stat(part, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                if not pending:
                    return Place(parent, part, walked, None, by_link)
                if not make_parents or by_link:
                    raise SandboxPathError(f"{path!r}: directory {walked!r} does not exist") from None
                os.mkdir(part, 0o755, dir_fd=parent)
                info = os.stat(part, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode) and (pending or follow):
                links += 1
                if links > MAX_LINKS:
                    raise SandboxPathError(f"{path!r}: more than {MAX_LINKS} links")
                by_link = by_link or not pending
                target = os.readlink(part, dir_fd=parent)
                if target.startswith("/"):
                    stack = stack[:1]
                pending.extendleft(reversed(_inside(target, path)))
            elif not pending:
                return Place(parent, part, walked, info, by_link)
            else:
                if not stat.S_ISDIR(info.st_mode):
                    raise SandboxPathError(f"{path!r}: {walked!r} is not a directory")
                fd = os.open(part, _TRAVERSE, dir_fd=parent)
                opened.append(fd)
                stack.append((part, fd))
        walked = "/".join(name for name, _ in stack[1:])
        return Place(stack[-1][1], ".", walked, os.fstat(stack[-1][1]), by_link)


@contextmanager
def _done_if_absent(entry: DeltaEntry) -> Iterator[None]:
    """A deletion below what is no directory any more has nothing to do."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        if entry.kind != "delete":
            raise


def _inside(path: str, asked: str) -> list[str]:
    """Components of a path; an absolute one must lie below the workspace and loses that prefix."""
    if "\0" in path:
        raise SandboxPathError(f"{asked!r} contains a zero byte")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/"):
        if not parts or parts[0] != WORKSPACE.strip("/"):
            raise SandboxPathError(f"{asked!r} leaves the workspace")
        return parts[1:]
    return parts


def _write_file(parent: int, name: str, data: bytes, mode: int) -> None:
    """Whole or not at all: written beside, then renamed over."""
    beside = f".odradek-{secrets.token_hex(8)}"
    fd = os.open(beside, _CREATE, 0o600, dir_fd=parent)
    try:
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(data)
            os.fchmod(file.fileno(), mode)
        os.rename(beside, name, src_dir_fd=parent, dst_dir_fd=parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=parent)
        raise


def _entries(fd: int, prefix: str, recursive: bool) -> Iterator[FileStat]:
    for item in os.scandir(fd):
        try:
            info = item.stat(follow_symlinks=False)
        except (FileNotFoundError, PermissionError):
            continue  # removed meanwhile, or in a directory that is closed to the agent itself
        yield _stat_at(fd, item.name, prefix + item.name, info)
        if recursive and stat.S_ISDIR(info.st_mode):
            try:
                below = os.open(item.name, _DIRECTORY, dir_fd=fd)
            except (PermissionError, FileNotFoundError, NotADirectoryError):
                continue  # closed to the agent itself, or gone
            try:
                yield from _entries(below, f"{prefix}{item.name}/", recursive)
            finally:
                os.close(below)


def _stat_at(parent: int, name: str, path: str, info: os.stat_result) -> FileStat:
    target = ""
    if stat.S_ISLNK(info.st_mode):
        with contextlib.suppress(OSError):
            target = os.readlink(name, dir_fd=parent)
    return _file_stat(path, info, target)


def _file_stat(path: str, info: os.stat_result, target: str) -> FileStat:
    kinds: dict[int, Literal["file", "symlink", "dir", "other"]] = {
        stat.S_IFREG: "file",
        stat.S_IFLNK: "symlink",
        stat.S_IFDIR: "dir",
    }
    kind = kinds.get(stat.S_IFMT(info.st_mode), "other")
    return FileStat(path, kind, info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime_ns, target)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Turn the kernel's refusals into ours: a wrong path is the caller's, a full or broken disk is the host's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EBADF):
            raise SandboxInfraError(f"workspace file {path!r}: {error.strerror}") from error
        raise SandboxPathError(f"{path!r}: {error.strerror}") from error
