"""The copy of a person's folder that a session starts from, and the form in which it is logged.

A snapshot is the selected files and links, read once without following a link. Modes are kept as git keeps them: the
sandbox sees 0644 or 0755. Small trees travel inside `session.opened`; larger ones as one tar in the object store, put
before the event. Links and executable bits, which an event's files don't have, are made by set-up commands, so that
image + files + set-up is the whole start, whichever form it has.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from odradek.actors.environment.archive import pack
from odradek.actors.session.ports import WorkspaceStart
from odradek.infra.serve.errors import FolderRefused, ThroughLink
from odradek.infra.serve.folder import Folder, Kind, digest_of
from odradek.infra.serve.select import Selection, secret_inside
from odradek.sandbox_images.tree import FileSpec

MAX_BYTES = 200_000_000
"""Bytes of content that are copied at most: what a request is sent with and a sandbox is filled from."""

INLINE_BYTES = 128 * 1024
"""Bytes of content that still travel inside session.opened. Too low: an object for a few lines; too high: an event near
the broker's record limit."""

COMMAND_BYTES = 60_000
"""Length of one set-up command; the kernel refuses an argument of 131,072 bytes."""

FILE_MODE, PROGRAM_MODE, DIRECTORY_MODE = 0o644, 0o755, 0o755


@dataclass(frozen=True, slots=True)
class Node:
    """A file, link or directory of a workspace. `content` is a file's bytes or a link's text."""

    kind: Literal["file", "symlink", "dir"]
    mode: int = 0
    content: bytes = b""

    @property
    def digest(self) -> str:
        """As `folder.Found.digest`."""
        return "" if self.kind == "dir" else digest_of(self.content)


Tree = Mapping[str, Node]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was copied, and what was left out (path to reason)."""

    tree: Tree
    left_out: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of content."""
        return sum(len(node.content) for node in self.tree.values())


def take(root: Path, selection: Selection, max_bytes: int = MAX_BYTES) -> Snapshot:
    """Read the selected paths; refused with the number if they hold more than `max_bytes`."""
    total = sum(_size(root / path) for path in selection.paths)
    if total > max_bytes:
        raise FolderRefused(
            f"{root} has {total / 1e6:,.1f} MB to copy, at most {max_bytes / 1e6:,.0f} MB are: "
            "name large data in .gitignore, or run in a smaller folder"
        )
    tree: dict[str, Node] = {}
    left_out = dict(selection.left_out)
    with Folder(root) as folder:
        for path in selection.paths:
            try:
                node = _node(folder, path)
            except (PermissionError, ThroughLink) as error:
                left_out[path] = "can't be read" if isinstance(error, PermissionError) else "is behind a link"
                continue
            if node is not None and (reason := secret_inside(path, node.content)):
                left_out[path] = reason
            elif node is not None:
                tree[path] = node
    return Snapshot(tree, left_out)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _node(folder: Folder, path: str) -> Node | None:
    found = folder.look(path)
    if found is None:
        return None
    kind: Kind = found.kind
    if kind == "file":
        return Node("file", PROGRAM_MODE if found.mode & 0o100 else FILE_MODE, folder.read(path))
    if kind == "symlink":
        return Node("symlink", 0, os.fsencode(folder.link_text(path)))
    return None


def start_of(tree: Tree, image: str) -> WorkspaceStart:
    """What the environment makes the workspace from."""
    files = {path: node.content for path, node in tree.items() if node.kind == "file"}
    return WorkspaceStart(image, files, list(_setup(tree)))


def _setup(tree: Tree) -> Iterator[str]:
    programs = [shlex.quote(f"./{p}") for p, node in sorted(tree.items()) if node.kind == "file" and node.mode & 0o100]
    yield from _batched("chmod 755", programs, " ")
    links = {path: node for path, node in sorted(tree.items()) if node.kind == "symlink"}
    folders = sorted({os.path.dirname(path) for path in links} - {""})  # noqa: PTH120 - paths inside the workspace
    yield from _batched("mkdir -p", [shlex.quote(f"./{folder}") for folder in folders], " ")
    made = [f"ln -s -- {shlex.quote(os.fsdecode(node.content))} {shlex.quote('./' + p)}" for p, node in links.items()]
    yield from _batched("", made, " && ")


def _batched(head: str, parts: list[str], joint: str) -> Iterator[str]:
    batch: list[str] = []
    length = 0
    for part in parts:
        size = len(os.fsencode(part)) + len(joint)
        if batch and length + size > COMMAND_BYTES:
            yield f"{head} {joint.join(batch)}".lstrip()
            batch, length = [], 0
        batch.append(part)
        length += size
    if batch:
        yield f"{head} {joint.join(batch)}".lstrip()


def as_tar(tree: Tree) -> bytes:
    """The tree as one tar with the same bytes for the same tree."""
    files = {}
    for path, node in tree.items():
        if node.kind == "symlink":
            files[path] = FileSpec(target=os.fsdecode(node.content))
        else:
            files[path] = FileSpec(node.content, node.mode)
    return pack(files)
