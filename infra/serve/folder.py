"""A directory of the host reached without ever following a symbolic link below it.

Each path is walked one component at a time, each opened relative to its parent and never through a link, so that
neither a link that stands there nor one that appears in between leads a read or a write out of the folder. Unlike in a
sandbox, where links that stay inside are followed, a link on the way is an error here: what a person accepted names
real places. Blocking calls; each is one local file operation.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odradek.infra.serve.errors import FolderRefused, ThroughLink

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: opening a pipe must not wait

Kind = Literal["file", "symlink", "dir", "other"]


@dataclass(frozen=True, slots=True)
class Found:
    """What stands at a path. `digest` is the SHA-256 of a file's content or of a link's text."""

    kind: Kind
    mode: int
    digest: str = ""
    uid: int = -1
    gid: int = -1
    device: int = -1


def digest_of(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


class Folder:
    """The tree below `root`. Use as a context manager."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise FolderRefused(f"{root}: {error.strerror or error}") from error

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    @contextlib.contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The open parent directory of `path` and the last name. FileNotFoundError or NotADirectoryError where there
        is none; `ThroughLink` where a component is a link."""
        parts = split(path)
        descriptor = os.dup(self.fd)
        try:
            for name in parts[:-1]:
                try:
                    deeper = os.open(name, DIRECTORY_FLAGS, dir_fd=descriptor)
                except OSError:
                    if stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                        raise ThroughLink(f"{path}: goes through the symbolic link {name}") from None
                    raise
                os.close(descriptor)
                descriptor = deeper
            yield descriptor, parts[-1]
        finally:
            os.close(descriptor)

    def look(self, path: str) -> Found | None:
        """What stands at `path`; None if nothing does, or if one of its parents is missing or no directory."""
        try:
            with self.parent(path) as (parent, name):
                return look_at(parent, name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str) -> bytes:
        """The content of the regular file at `path`."""
        with self.parent(path) as (parent, name):
            return read_at(parent, name)

    def link_text(self, path: str) -> str:
        """What the symbolic link at `path` says."""
        with self.parent(path) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    def files_below(self, path: str) -> Iterator[str]:
        """Paths of everything below the directory `path` that is not a directory."""
        with self.parent(path) as (parent, name):
            descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
        try:
            names = os.listdir(descriptor)  # noqa: PTH208 - of an open directory
            kinds = {n: os.stat(n, dir_fd=descriptor, follow_symlinks=False).st_mode for n in names}
        finally:
            os.close(descriptor)
        for name, mode in sorted(kinds.items()):
            below = f"{path}/{name}"
            if stat.S_ISDIR(mode):
                yield from self.files_below(below)
            else:
                yield below


def split(path: str) -> list[str]:
    """The components of a plain relative path; `ThroughLink` for one that leads elsewhere."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ThroughLink(f"{path!r}: not a plain path inside the folder")
    return parts


def look_at(parent: int, name: str) -> Found | None:
    """What stands at `name` in an open directory."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    mode = stat.S_IMODE(info.st_mode)
    owner = (info.st_uid, info.st_gid, info.st_dev)
    if stat.S_ISLNK(info.st_mode):
        return Found("symlink", 0, digest_of(os.fsencode(os.readlink(name, dir_fd=parent))), *owner)
    if stat.S_ISDIR(info.st_mode):
        return Found("dir", mode, "", *owner)
    if stat.S_ISREG(info.st_mode):
        return Found("file", mode, digest_of(read_at(parent, name)), *owner)
    return Found("other", mode, "", *owner)


def read_at(parent: int, name: str) -> bytes:
    """The content of a regular file in an open directory."""
    with os.fdopen(os.open(name, READ_FLAGS, dir_fd=parent), "rb") as file:
        return file.read()
