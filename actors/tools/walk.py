"""A bounded walk over the workspace's files, in one order everywhere. Links are reported, never entered (no loops)."""

from collections.abc import AsyncIterator

import msgspec

from odradek.actors.tools.errors import NoSuchFile
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.paths import join
from odradek.actors.tools.workspace import Entry, Workspace

SKIPPED_DIRECTORIES = frozenset({".git", ".hg", "__pycache__", "node_modules", ".venv", ".mypy_cache", ".pytest_cache"})
"""Not entered unless the call names them: machine-made, large, and never what a search is after."""


class Walked(msgspec.Struct):
    """Counts of a walk, filled while it runs; `complete` is False if a cap ended it."""

    files: int = 0
    entries: int = 0
    complete: bool = True


async def walk_files(
    workspace: Workspace, path: str, limits: Limits, walked: Walked
) -> AsyncIterator[tuple[str, Entry]]:
    """Every regular file at or below `path` (a file yields itself), in one order: names sorted, a directory
    where its name stands."""
    found = await workspace.stat(path)
    if found is None:
        raise NoSuchFile(f"no such file or directory {path}")
    if found.kind != "directory":
        walked.files += 1
        yield path, Entry(path.rsplit("/", 1)[-1], found.kind, found.size)
        return
    pending = [(path, Entry(path, "directory", 0))]
    while pending:
        here, entry = pending.pop()
        if entry.kind == "file":
            walked.files += 1
            yield here, entry
        elif entry.kind == "directory" and (here == path or entry.name not in SKIPPED_DIRECTORIES):
            below = [(join(here, item.name), item) for item in await workspace.list(here)]
            walked.entries += len(below)
            if walked.entries > limits.scan_files:
                walked.complete = False
                return
            pending.extend(reversed(below))
