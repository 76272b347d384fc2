"""Files below one directory of the host, reached in a way no link and no race can lead out of.

A host process that opens `root/path` by name trusts every link the agent planted on the way, and a check before the
open is no help: a background process swaps the directory in between. So the path is walked by hand, one component at
a time, each opened relative to the descriptor of its parent and never through a link; a link's text is read and
walked by the same rule. What was checked is what is open.

Absolute link targets are read as the workspace's own processes would: below `mount` they are inside, elsewhere
outside. Blocking calls, but each is one local file operation.
"""

import contextlib
import errno
import os
import secrets
import stat as stat_bits
from collections import deque
from collections.abc import Iterator

from odradek.actors.tools.errors import FileSystemRefused, NoSuchFile, PathRefused, TooLarge, WrongKind
from odradek.actors.tools.paths import relative
from odradek.actors.tools.workspace import Entry, FileStat, Kind

LINKS_MAX = 40
"""Links followed on one path, the kernel's own number; more is a loop."""

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # NONBLOCK: opening a pipe must not wait
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


Chain = list[int]
"""Open directories from the root to where a walk stands."""


class _Place:
    """Where a path leads: the open parent directory, the name in it, and what stands there.

    `name` is None for a directory (then `parent` is that directory itself); `missing` are the components from the
    first absent one on, empty if all exist.
    """

    def __init__(self, parent: int, name: str | None, found: os.stat_result | None, missing: list[str]) -> None:
        self.parent, self.name, self.found, self.missing = parent, name, found, missing


class Beneath:
    """The tree below `root`; `mount` is the absolute path under which the workspace's own processes see it."""

    def __init__(self, root: str, mount: str) -> None:
        self._root, self._mount = root, mount

    def read(self, path: str, max_bytes: int) -> bytes:
        """The regular file at `path`."""
        with self._open(path) as place:
            self._need_file(path, place)
            assert place.name is not None
            with _refusals(path):
                descriptor = os.open(place.name, READ_FLAGS, dir_fd=place.parent)
            with os.fdopen(descriptor, "rb") as file:
                if not stat_bits.S_ISREG(os.fstat(descriptor).st_mode):
                    raise WrongKind(f"{path} is not a regular file")
                content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise TooLarge(f"{path} has more than {max_bytes} bytes; use run_terminal to read a part of it")
        return content

    def write(self, path: str, content: bytes, mode: int | None) -> None:
        """Replace or create the regular file at `path`: a new file renamed over the old one, so never half of it."""
        with self._open(path) as place:
            if place.found is None and not place.missing:
                raise WrongKind(f"{path} is a directory")
            if place.found is not None:
                self._need_file(path, place)
                mode = stat_bits.S_IMODE(place.found.st_mode) if mode is None else mode
            with _refusals(path):
                parent = self._make_parents(place)
                try:
                    _replace(parent, place.name or place.missing[-1], content, 0o644 if mode is None else mode)
                finally:
                    if parent != place.parent:
                        os.close(parent)

    def stat(self, path: str) -> FileStat | None:
        """What stands at `path`, or None."""
        try:
            with self._open(path, dangling_is_missing=True) as place:
                if place.missing:
                    return None
                found = place.found or os.fstat(place.parent)
                return FileStat(_kind(found.st_mode), found.st_size, stat_bits.S_IMODE(found.st_mode))
        except NoSuchFile:
            return None

    def list(self, path: str) -> list[Entry]:
        """The entries of the directory at `path`, sorted."""
        with self._open(path) as place:
            if place.missing:
                raise NoSuchFile(f"no such directory {path}")
            if place.found is not None:
                raise WrongKind(f"{path} is not a directory")
            entries = []
            with os.scandir(place.parent) as found:
                for item in found:
                    with contextlib.suppress(FileNotFoundError):  # removed while we look
                        status = item.stat(follow_symlinks=False)
                        entries.append(Entry(item.name, _kind(status.st_mode), status.st_size))
        return sorted(entries, key=lambda entry: entry.name)

    @contextlib.contextmanager
    def _open(self, path: str, dangling_is_missing: bool = False) -> Iterator[_Place]:
        """Walk to `path`; the descriptors live as long as the `with` block."""
        opened = [os.open(self._root, DIRECTORY_FLAGS)]
        try:
            with _refusals(path):
                place = self._walk(path, opened, dangling_is_missing)
            yield place
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _walk(self, path: str, opened: Chain, dangling_is_missing: bool) -> _Place:
        """`opened` is the chain of directories from the root to where we stand (so `..` is one step back)."""
        pending = deque((part, False) for part in relative(path, self._mount).split("/"))
        links = 0
        while pending:
            part, from_link = pending.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                if len(opened) == 1:
                    raise PathRefused(f"{path} leads out of the workspace")
                os.close(opened.pop())
                continue
            try:
                found = os.stat(part, dir_fd=opened[-1], follow_symlinks=False)
            except FileNotFoundError:
                if from_link and not dangling_is_missing:
                    raise PathRefused(f"{path} goes through a link to nothing") from None
                missing = [part, *(name for name, _ in pending if name not in ("", "."))]
                if ".." in missing:
                    raise NoSuchFile(f"no such file {path}") from None
                return _Place(opened[-1], None, None, missing)
            if stat_bits.S_ISLNK(found.st_mode):
                links += 1
                if links > LINKS_MAX:
                    raise PathRefused(f"{path} is a loop of links")
                target = os.readlink(part, dir_fd=opened[-1])
                if target.startswith("/"):
                    try:
                        target = relative(target, self._mount)
                    except PathRefused:
                        raise PathRefused(f"{path} is a link out of the workspace") from None
                    while len(opened) > 1:
                        os.close(opened.pop())
                pending.extendleft((name, True) for name in reversed(target.split("/")))
            elif stat_bits.S_ISDIR(found.st_mode):
                opened.append(os.open(part, DIRECTORY_FLAGS, dir_fd=opened[-1]))
            elif any(name not in ("", ".") for name, _ in pending):
                raise WrongKind(f"{path} goes through a file as if it were a directory")
            else:
                return _Place(opened[-1], part, found, [])
        return _Place(opened[-1], None, None, [])

    def _need_file(self, path: str, place: _Place) -> None:
        if place.missing:
            raise NoSuchFile(f"no such file {path}")
        if place.found is None:
            raise WrongKind(f"{path} is a directory")
        if not stat_bits.S_ISREG(place.found.st_mode):
            raise WrongKind(f"{path} is not a regular file")

    @staticmethod
    def _make_parents(place: _Place) -> int:
        parent = place.parent
        for name in place.missing[:-1]:
            os.mkdir(name, 0o755, dir_fd=parent)
            made = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
            if parent != place.parent:
                os.close(parent)
            parent = made
        return parent


def _replace(directory: int, name: str, content: bytes, mode: int) -> None:
    temporary = f".{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def _kind(mode: int) -> Kind:
    if stat_bits.S_ISREG(mode):
        return "file"
    if stat_bits.S_ISDIR(mode):
        return "directory"
    return "link" if stat_bits.S_ISLNK(mode) else "other"


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    """An errno that the path or the agent's own tree causes is the call's fault; a host's fault (EIO) stays OSError."""
    try:
        yield
    except (PermissionError, FileExistsError, IsADirectoryError) as error:
        raise FileSystemRefused(f"{path}: {error.strerror}") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoSuchFile(f"no such file {path}") from error
    except OSError as error:
        if error.errno in _AGENT_ERRNOS:
            raise FileSystemRefused(f"{path}: {error.strerror}") from error
        raise


_AGENT_ERRNOS = frozenset({errno.ENAMETOOLONG, errno.ELOOP, errno.EDQUOT, errno.EROFS, errno.ENXIO})
"""ELOOP: a name became a link while we walked; ENXIO: a socket; EDQUOT: the workspace's own quota."""
