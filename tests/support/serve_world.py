"""Folders, trees and changes for the tests of serving a person."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from odradek.infra.serve.apply import apply
from odradek.infra.serve.changes import Change, Changes, compare, with_directories
from odradek.infra.serve.snapshot import FILE_MODE, Node, Tree


def file(content: str = "", mode: int = FILE_MODE) -> Node:
    return Node("file", mode, content.encode())


def link(target: str) -> Node:
    return Node("symlink", 0, target.encode())


def directory() -> Node:
    return Node("dir", 0o755)


def nothing_ignored(_paths: Sequence[str]) -> set[str]:
    return set()


def changes(before: Tree, after: Tree) -> list[Change]:
    """From one tree to another; both get the directories they need."""
    return compared(before, after).changes


def compared(before: Tree, after: Tree) -> Changes:
    return compare(before, with_directories(after), nothing_ignored)


def write_tree(root: Path, tree: Tree) -> None:
    """Make the tree on disk."""
    for path, node in sorted(with_directories(tree).items()):
        full = root / path
        if node.kind == "dir":
            full.mkdir(exist_ok=True)
        elif node.kind == "symlink":
            full.symlink_to(os.fsdecode(node.content))
        else:
            full.write_bytes(node.content)
            full.chmod(node.mode)


def on_disk(root: Path) -> dict[str, Node]:
    """What lies below a folder, directories included; their modes are not compared."""
    found: dict[str, Node] = {}
    for path in root.rglob("*"):
        name, info = str(path.relative_to(root)), path.lstat()
        if stat.S_ISLNK(info.st_mode):
            found[name] = link(os.readlink(path))  # noqa: PTH115 - verbatim
        elif stat.S_ISDIR(info.st_mode):
            found[name] = directory()
        else:
            found[name] = Node("file", stat.S_IMODE(info.st_mode), path.read_bytes())
    return found


def in_child(work: Callable[[Callable[[str], None]], None], die_at: int) -> int:
    """Run `work` in a forked process that ends, without any clean-up, at its fault point number `die_at`.

    Returns how many fault points it passed; fewer than or equal to `die_at` means that it ended by itself.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        passed = 0

        def fault(_name: str) -> None:
            nonlocal passed
            if passed == die_at:
                os._exit(9)
            passed += 1
            os.write(writer, b".")

        try:
            work(fault)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        passed = len(pipe.read())
    os.waitpid(child, 0)
    return passed


def killed_apply(root: Path, wanted: Sequence[Change], die_at: int) -> bool:
    """An `apply` whose process dies at a fault point; False once it has none of that number."""
    return in_child(lambda fault: apply(root, wanted, fault), die_at) == die_at


def tree_of(files: Mapping[str, str]) -> dict[str, Node]:
    return {path: file(text) for path, text in files.items()}
