"""What a session changed: the workspace's deltas folded over what was copied, as a list of changes for a person.

Pure. The same changes are shown, accepted and applied. Two kinds of change are set aside, by name: by-products (ignored
paths, caches) and anything inside a `.git`, where a file can be a program that git runs later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from odradek.actors.environment.delta import Delta, in_order
from odradek.actors.tools.diff import unified
from odradek.actors.tools.text import show_name
from odradek.infra.serve.select import Ignored
from odradek.infra.serve.snapshot import DIRECTORY_MODE, Node, Tree


@dataclass(frozen=True, slots=True)
class Change:
    """One path before (as copied; None: not there) and after. Directories appear only as wholly new or wholly gone."""

    path: str
    before: Node | None
    after: Node | None


@dataclass(frozen=True, slots=True)
class Changes:
    """What to ask about (sorted by path), and the paths set aside."""

    changes: list[Change]
    by_products: list[str]
    refused: list[str]
    """Changes inside a `.git`: never brought back."""


def with_directories(tree: Tree) -> dict[str, Node]:
    """The tree with the directories that its paths need."""
    whole = dict(tree)
    for path in tree:
        for parent in _parents(path):
            whole.setdefault(parent, Node("dir", DIRECTORY_MODE))
    return whole


def apply_delta(tree: Tree, delta: Delta) -> dict[str, Node]:
    """The tree after a delta: an entry replaces whatever is there, a directory over a directory only sets its mode."""
    state = dict(tree)
    for entry in in_order(delta):
        before = state.get(entry.path)
        if entry.kind == "delete" or (before is not None and not before.kind == entry.kind == "dir"):
            for path in [p for p in state if p == entry.path or p.startswith(entry.path + "/")]:
                del state[path]
        if entry.kind == "delete":
            continue
        for parent in _parents(entry.path):
            state.setdefault(parent, Node("dir", DIRECTORY_MODE))
        content = entry.target.encode() if entry.kind == "symlink" else entry.content or b""
        state[entry.path] = Node(entry.kind, entry.mode & 0o777, content)
    return state


def fold(tree: Tree, deltas: Iterable[Delta]) -> dict[str, Node]:
    """The workspace after the session's deltas, in order; directories included."""
    state = with_directories(tree)
    for delta in deltas:
        state = apply_delta(state, delta)
    return state


def compare(copied: Tree, final: Tree, ignored: Ignored) -> Changes:
    """The changes from what was copied to the final workspace (`fold`)."""
    before = with_directories(copied)
    different = [p for p in sorted({*before, *final}) if not _same(before.get(p), final.get(p))]
    refused = [path for path in different if any(part.lower() == ".git" for part in path.split("/"))]
    new = [path for path in different if path not in before and path not in refused]
    by_products = ignored(new) | ignored([f"{path}/" for path in new if final[path].kind == "dir"])
    by_products = {path.rstrip("/") for path in by_products}
    kept = [p for p in different if p not in by_products and p not in refused]
    return Changes([Change(p, before.get(p), final.get(p)) for p in kept], sorted(by_products), refused)


def _same(before: Node | None, after: Node | None) -> bool:
    """A directory's mode is not part of the work."""
    if before is None or after is None:
        return before is after
    return before == after or before.kind == after.kind == "dir"


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


# -- for a person -----------------------------------------------------------------------------------------------------


def as_diff(changes: Iterable[Change]) -> str:
    """All changes as one unified diff in git's style."""
    return "".join(diff_of(change) for change in changes)


def diff_of(change: Change) -> str:
    """One change: header lines for kind and mode, then the content's diff."""
    path, before, after = show_name(change.path), change.before, change.after
    if "dir" in (before and before.kind, after and after.kind) and None in (before, after):
        return f"{'remove' if after is None else 'make'} directory {path}\n"
    lines = [f"diff {path}\n"]
    if after is None:
        lines.append("deleted\n")
    elif before is None:
        lines.append(f"new {_name(after)}\n")
    elif before.kind != after.kind:
        lines.append(f"{_name(before)} becomes {_name(after)}\n")
    elif before.mode != after.mode:
        lines.append(f"mode {before.mode:04o} becomes {after.mode:04o}\n")
    old, new = _content(before), _content(after)
    if b"\0" in (old or b"") or b"\0" in (new or b""):
        lines.append(f"binary, {_length(old)} becomes {_length(new)}\n")
    elif old != new:
        body = unified(path, old, new or b"")
        lines.append(body if after is not None else body.replace(f"+++ b/{path}\n", "+++ /dev/null\n", 1))
    return "".join(lines)


def _content(node: Node | None) -> bytes | None:
    return None if node is None or node.kind == "dir" else node.content


def _name(node: Node) -> str:
    names: Mapping[str, str] = {"symlink": "symbolic link", "dir": "directory"}
    return names.get(node.kind, "program" if node.mode & 0o111 else "file")


def _length(content: bytes | None) -> str:
    return "nothing" if content is None else f"{len(content)} bytes"
