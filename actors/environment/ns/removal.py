"""Removing what sandboxes leave: trees in which an agent may have forbidden everything to everybody, and cgroups.

Standard library only: the zygote uses it too.
"""

# ruff: noqa: PTH106, PTH208 - paths relative to open directories

import contextlib
import os
import stat


def remove_tree(name: str, dir_fd: int) -> None:
    """Remove `name` below the open directory, whatever the modes inside. Links are not followed; absent is done, also
    when somebody else removes it meanwhile.
    """
    with contextlib.suppress(FileNotFoundError):
        _remove_tree(name, dir_fd)


def _remove_tree(name: str, dir_fd: int) -> None:
    info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=dir_fd)
        return
    if info.st_mode & 0o700 != 0o700:
        os.chmod(name, 0o700, dir_fd=dir_fd)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        for child in os.listdir(fd):
            remove_tree(child, fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=dir_fd)


def remove_cgroups(paths: list[str]) -> None:
    """Remove empty cgroups below and including `paths`; one still in use is left for the next start."""
    for path in paths:
        for directory, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
