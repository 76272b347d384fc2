"""What sandboxes leave is removed whatever a command made of it (actors/environment/ns/removal.py)."""

from __future__ import annotations

import os
from pathlib import Path

from odradek.actors.environment.ns.removal import remove_tree

DEPTH = 3_000
"""More levels than Python calls or open files may nest."""


def removed(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY)
    try:
        remove_tree("tree", fd)
        remove_tree("tree", fd)
    finally:
        os.close(fd)
    return not (folder / "tree").exists()


def test_a_tree_deeper_than_calls_may_nest_is_removed(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    os.mkdir("tree", dir_fd=here)
    for name in ["tree"] + ["d"] * DEPTH:
        inside = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inside
        os.mkdir("d", dir_fd=here)
        os.close(os.open("f", os.O_CREAT, dir_fd=here))
    os.close(here)
    assert removed(tmp_path)


def test_forbidden_modes_links_and_names_like_ours_are_removed_and_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "f").write_text("x")
    (tree / "moved-1").mkdir()
    (tree / "moved-2").write_text("x")
    (tree / "a" / "link").symlink_to(tmp_path / "outside")
    (tree / "a" / "b").chmod(0)
    (tree / "a").chmod(0)
    assert removed(tmp_path)
    assert (tmp_path / "outside" / "kept").exists()
