"""Which paths a tree that strangers give may have: one rule for workspaces, their tars and verifiers. Pure."""

from __future__ import annotations

from collections.abc import Collection

MAX_PATH_BYTES = 4095
MAX_PATH_PART_BYTES = 255
"""What Linux takes as a path and as one name in it. Longer ones fail in every sandbox of every attempt."""

SHOWN = 80
"""Characters of a foreign value that a reason quotes. More makes the reason as large as the task."""


def quoted(value: str) -> str:
    """A foreign value in a reason: its beginning."""
    return repr(value if len(value) <= SHOWN else f"{value[:SHOWN]}…")


def paths_fault(paths: Collection[str]) -> str | None:
    """What is wrong with the paths of one tree's files: they stay inside, and name no two things at once."""
    for path in paths:
        parts = path.split("/")
        if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
            return f"{quoted(path)} is no relative path of a file"
        if len(path.encode(errors="surrogateescape")) > MAX_PATH_BYTES or any(
            len(part.encode(errors="surrogateescape")) > MAX_PATH_PART_BYTES for part in parts
        ):
            return (
                f"{quoted(path)} is longer than a path can be: at most {MAX_PATH_BYTES} bytes, and "
                f"{MAX_PATH_PART_BYTES} a name"
            )
        if ".git" in parts:
            return f"{quoted(path)} is part of a repository's history, where later commits may hold the fix"
        above = next((parent for at in range(1, len(parts)) if (parent := "/".join(parts[:at])) in paths), None)
        if above is not None:
            return f"{quoted(above)} is a file and, in {quoted(path)}, a folder"
    return None
