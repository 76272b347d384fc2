"""The workspace delta: what a call changed, in a form that any host can apply.

A `Delta` is a set of changes between two states of the workspace tree. Paths are relative to the workspace, `/`
separates, entries are sorted by path. A `delete` removes the whole subtree and only its topmost path is listed; where
nothing is, it is done. Any other entry replaces whatever is there, except that a `dir` over a directory only sets its
mode. Times and owners are not part of the state. What a delta can't carry (sockets, FIFOs, names that are not UTF-8)
is named in `skipped`, so that a loss is visible and never silent.

Pure data and pure functions: `compose` folds deltas, `check` refuses malformed ones before anything is written.
"""

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Literal

import msgspec

from odradek.actors.environment.errors import SandboxSpecError

Kind = Literal["file", "symlink", "dir", "delete"]


class DeltaEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One changed path. `digest` is the SHA-256 (hex) of a file's content."""

    path: str
    kind: Kind
    mode: int = 0
    """Permission bits (0o7777) of a file or directory; 0 for a link or a deletion."""
    size: int = 0
    digest: str = ""
    content: bytes | None = None
    """A file's bytes, or None where they are to be fetched by `digest`."""
    target: str = ""
    """What a symbolic link says, verbatim."""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of one call, or of a session so far, sorted by path."""

    entries: tuple[DeltaEntry, ...] = ()
    skipped: tuple[str, ...] = ()
    """Readable names of what could not be carried, with the reason."""


def compose(deltas: Iterable[Delta]) -> Delta:
    """One delta with the same effect as `deltas` applied in order."""
    state: dict[str, DeltaEntry] = {}
    cleared: set[str] = set()  # paths whose former content must go before the new entry is put there
    skipped: list[str] = []
    for delta in deltas:
        skipped.extend(delta.skipped)
        for entry in sorted(delta.entries, key=_order):
            before = state.get(entry.path)
            if entry.kind != "dir" or (before is not None and before.kind in ("file", "symlink")):
                for path in [p for p in state if p.startswith(entry.path + "/")]:
                    del state[path]
                    cleared.discard(path)
            if before is not None and before.kind != "dir":
                cleared.add(entry.path)
            state[entry.path] = entry
    entries: list[DeltaEntry] = []
    for path, entry in state.items():
        if entry.kind == "delete" and any(above in cleared for above in _parents(path)):
            continue  # went with the former content of that directory
        if path in cleared and entry.kind == "dir":
            entries.append(DeltaEntry(path=path, kind="delete"))
        entries.append(entry)
    return Delta(entries=tuple(sorted(entries, key=lambda e: (e.path, e.kind != "delete"))), skipped=tuple(skipped))


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def _order(entry: DeltaEntry) -> tuple[bool, str]:
    """Deletions first, then parents before children."""
    return entry.kind != "delete", entry.path


def in_order(delta: Delta) -> list[DeltaEntry]:
    """The entries in the order in which they must be applied: deletions, then parents before children."""
    return sorted(delta.entries, key=_order)


def check(delta: Delta) -> None:
    """Refuse a delta that names a path outside the workspace, twice the same change, or an impossible entry."""
    seen: set[tuple[str, bool]] = set()
    for entry in delta.entries:
        parts = PurePosixPath(entry.path).parts
        if not parts or entry.path != "/".join(parts) or parts[0] == "/" or ".." in parts or "\0" in entry.path:
            raise SandboxSpecError(f"delta entry {entry.path!r}: not a plain path inside the workspace")
        key = (entry.path, entry.kind == "delete")
        if key in seen:
            raise SandboxSpecError(f"delta entry {entry.path!r} appears twice")
        seen.add(key)
        if entry.kind == "symlink" and not entry.target:
            raise SandboxSpecError(f"delta entry {entry.path!r}: a symlink without a target")
        if entry.kind == "file" and entry.content is None and not entry.digest:
            raise SandboxSpecError(f"delta entry {entry.path!r}: a file with neither content nor digest")
