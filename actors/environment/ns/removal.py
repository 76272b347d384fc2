"""Removing what sandboxes leave: trees in which an agent may have forbidden everything to everybody, and cgroups.

Standard library only: the zygote uses it too.
"""

# ruff: noqa: PTH106, PTH112, PTH208 - plain strings, paths relative to open directories

import contextlib
import errno
import os
import stat
import time

POLL_S = 0.02
"""Seconds between two tries to remove a cgroup whose last process is just ending."""


def remove_tree(name: str, dir_fd: int) -> None:
    """Remove `name` below the open directory, whatever the modes inside and however deep it is. Links are not followed;
    absent is done, also when somebody else removes it meanwhile.

    A command can nest directories deeper than calls or open files may nest here. So nothing recurses: directories found
    in a child are first moved up beside it, and the child is then empty.
    """
    with contextlib.suppress(FileNotFoundError):
        if not _is_directory(name, dir_fd):
            os.unlink(name, dir_fd=dir_fd)
            return
        top = _open(name, dir_fd)
        try:
            moved = 0
            while children := os.listdir(top):
                for child in children:
                    moved = _remove_child(child, top, moved)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=dir_fd)


def _remove_child(name: str, top: int, moved: int) -> int:
    """Remove one entry of `top`; what directories it has come up into `top`. Returns how many were moved so far."""
    with contextlib.suppress(FileNotFoundError):
        if not _is_directory(name, top):
            os.unlink(name, dir_fd=top)
            return moved
        fd = _open(name, top)
        try:
            for inner in os.listdir(fd):
                with contextlib.suppress(FileNotFoundError):
                    if _is_directory(inner, fd):
                        moved = _move_up(inner, fd, top, moved)
                    else:
                        os.unlink(inner, dir_fd=fd)
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=top)
    return moved


def _move_up(name: str, dir_fd: int, top: int, moved: int) -> int:
    """A directory must be writable itself to get another parent; a name that is taken is counted past."""
    os.chmod(name, 0o700, dir_fd=dir_fd)
    while True:
        moved += 1
        try:
            os.stat(f"moved-{moved}", dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            break
    try:
        os.rename(name, f"moved-{moved}", src_dir_fd=dir_fd, dst_dir_fd=top)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        remove_tree(name, dir_fd)  # an image's directory, seen through an overlay, can't be moved; images are shallow
    return moved


def _is_directory(name: str, dir_fd: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode)


def _open(name: str, dir_fd: int) -> int:
    if os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=dir_fd)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


def remove_cgroups(paths: list[str], patience_s: float = 0.0) -> list[str]:
    """Remove empty cgroups below and including `paths`; returns those that are still in use after `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        for path in paths:
            for directory, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(directory)
        left = [path for path in paths if os.path.isdir(path)]
        if not left or time.monotonic() >= end:
            return left
        time.sleep(POLL_S)
