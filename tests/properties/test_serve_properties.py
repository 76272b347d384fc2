"""Laws of copying and bringing back: any tree to any tree, through any crash; deltas fold as they apply on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.serve_world import killed_apply, nothing_ignored, on_disk, write_tree

from odradek.actors.environment.delta import Delta, DeltaEntry, compose
from odradek.infra.serve.apply import apply, recover
from odradek.infra.serve.changes import compare, fold, with_directories
from odradek.infra.serve.snapshot import Node, Tree

NAMES = st.sampled_from(["a", "b", "c d", "ü"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.builds(Node, st.just("file"), st.sampled_from([0o644, 0o755]), st.binary(max_size=3))
LINKS = st.builds(Node, st.just("symlink"), st.just(0), st.sampled_from([b"a", b"../a", b"nowhere"]))
DIRECTORIES = st.just(Node("dir", 0o755))


def _consistent(tree: dict[str, Node]) -> dict[str, Node]:
    """Without what lies below a file or link."""
    leaves = [path for path, node in tree.items() if node.kind != "dir"]
    return {path: node for path, node in tree.items() if not any(path.startswith(leaf + "/") for leaf in leaves)}


COPIED = st.dictionaries(PATHS, FILES | LINKS, max_size=5).map(_consistent)
FINAL = st.dictionaries(PATHS, FILES | LINKS | DIRECTORIES, max_size=5).map(_consistent)
MINE = st.dictionaries(st.lists(NAMES, max_size=2).map(lambda p: "/".join([*p, "mine"])), FILES, max_size=2)

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder and a state folder of its own."""
    base = Path(tempfile.mkdtemp(prefix="odr-serve-"))
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(base / "state")
    try:
        (base / "project").mkdir()
        yield base / "project"
    finally:
        if before is None:
            del os.environ["XDG_STATE_HOME"]
        else:
            os.environ["XDG_STATE_HOME"] = before
        shutil.rmtree(base)


@QUICK
@given(COPIED, FINAL)
def test_any_tree_becomes_any_tree(copied: dict[str, Node], final: dict[str, Node]) -> None:
    with _folder() as root:
        write_tree(root, copied)
        apply(root, compare(copied, with_directories(final), nothing_ignored).changes)
        assert on_disk(root) == with_directories(final)


@QUICK
@given(COPIED, FINAL, MINE, st.integers(0, 60))
def test_all_or_nothing_through_a_crash_and_around_what_was_never_copied(
    copied: dict[str, Node], final: dict[str, Node], mine: dict[str, Node], point: int
) -> None:
    """Wherever the process dies, what is recovered is the tree before or the tree after, and what was never copied is
    there, byte for byte, in either."""
    with _folder() as root:
        write_tree(root, copied)
        mine = {path: node for path, node in mine.items() if _fits(path, copied)}
        write_tree(root, mine)
        before = on_disk(root)
        died = killed_apply(root, compare(copied, with_directories(final), nothing_ignored).changes, point)
        recover(root)
        after = on_disk(root)
        assert {path: after.get(path) for path in mine} == mine
        whole = with_directories({**with_directories(final), **mine}) if _mixes(final, mine) else None
        assert after in (before, whole)
        if whole is not None and not died:
            assert after == whole


def _fits(path: str, tree: Tree) -> bool:
    """Whether a file can lie there beside the tree."""
    parts = path.split("/")
    above = ["/".join(parts[:n]) for n in range(1, len(parts))]
    return path not in with_directories(tree) and all(a not in tree or tree[a].kind == "dir" for a in above)


def _mixes(final: Tree, mine: Tree) -> bool:
    """Whether final tree and the person's other files can stand together."""
    whole = with_directories(final)
    return all(_fits(path, whole) for path in mine)


ENTRIES = st.one_of(
    st.builds(
        lambda p, c, m: DeltaEntry(path=p, kind="file", mode=m, content=c),
        PATHS,
        st.binary(max_size=2),
        st.sampled_from([0o644, 0o755]),
    ),
    st.builds(lambda p: DeltaEntry(path=p, kind="symlink", target="a"), PATHS),
    st.builds(lambda p: DeltaEntry(path=p, kind="delete"), PATHS),
    st.builds(lambda p: DeltaEntry(path=p, kind="dir", mode=0o755), PATHS),
)


@QUICK
@given(COPIED, st.lists(st.lists(ENTRIES, min_size=1, max_size=1), max_size=12))
def test_folding_deltas_one_by_one_is_folding_their_composition(
    copied: dict[str, Node], steps: list[list[DeltaEntry]]
) -> None:
    """The environment composes a session's deltas to rebuild it; the diff folds them. Both are one workspace."""
    deltas = [Delta(entries=tuple(step)) for step in _possible(copied, steps)]
    assert fold(copied, deltas) == fold(copied, [compose(deltas)])


def _possible(copied: Tree, steps: list[list[DeltaEntry]]) -> list[list[DeltaEntry]]:
    """The steps that a diff can hold: a directory is there, or listed, before anything below it."""
    kept: list[list[DeltaEntry]] = []
    for step in steps:
        state = fold(copied, [Delta(entries=tuple(s)) for s in kept])
        if all(_fits_entry(entry, state) for entry in step):
            kept.append(step)
    return kept


def _fits_entry(entry: DeltaEntry, state: Tree) -> bool:
    parts = entry.path.split("/")
    above = ["/".join(parts[:n]) for n in range(1, len(parts))]
    return all(path in state and state[path].kind == "dir" for path in above)
