"""The lexical half of the path rules: pure, before any file system is asked.

The other half (links, and `..` behind a link) needs the tree and is the sandbox driver's.
"""

import os
import posixpath

from odradek.actors.tools.errors import PathRefused

PATH_CHARS = 4096
"""Longest path accepted, the kernel's own limit; a longer one is refused with a message instead of an errno."""


def relative(path: str, mount: str) -> str:
    """The path relative to the workspace mounted at `mount`; `.` is the root itself.

    >>> relative("/workspace/a/b.py", "/workspace"), relative("./a//b.py", "/workspace")
    ('a/b.py', 'a/b.py')

    `..` is kept: behind a link it means the parent of the link's target, which only the tree knows. A path that
    climbs above the root even on paper is refused here.
    """
    if "\0" in path or len(path) > PATH_CHARS:
        raise PathRefused("the path is not a file name (it has a NUL or is too long)")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise PathRefused("the path is not a file name (it has half of a character)") from error
    if path.startswith("/"):
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if not inside:
            raise PathRefused(f"{path} is outside the workspace; paths are relative to {mount}")
        path = path[len(mount.rstrip("/")) :]
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if posixpath.normpath("/".join(parts) or ".").split("/")[0] == "..":
        raise PathRefused(f"{path} is outside the workspace; paths are relative to {mount}")
    return "/".join(parts) or "."


def join(directory: str, name: str) -> str:
    """`name` in `directory`, without a leading `./`."""
    return name if directory == "." else f"{directory}/{name}"
