"""`delta.compose` and `delta.check`, against a plain in-memory tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odradek.actors.environment.delta import Delta, DeltaEntry, check, compose, in_order
from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.ns.overlay import BaseTree, Changes, Node
from odradek.actors.environment.ns.workspace import changed

Tree = dict[str, Node]

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
NODES = st.sampled_from(
    [Node("dir", 0o755), Node("dir", 0o700), Node("file", 0o644, "d1"), Node("symlink", 0, target="a")]
)
CHANGES = st.lists(st.tuples(PATHS, NODES | st.none()), max_size=6)


def put(tree: Tree, path: str, node: Node | None) -> Tree:
    """The tree after a command put or removed something, parents made as needed."""
    tree = dict(tree)
    parts = path.split("/")
    for length in range(1, len(parts)):
        above = "/".join(parts[:length])
        if node is not None and tree.get(above, Node("file", 0)).kind != "dir":
            tree[above] = Node("dir", 0o755)
    if node is None or node.kind != "dir":
        tree = {p: n for p, n in tree.items() if not p.startswith(path + "/")}
    if node is None:
        tree.pop(path, None)
    else:
        tree[path] = node
    return tree


def apply(tree: Tree, delta: Delta) -> Tree:
    """What `Sandbox.apply` does, in memory."""
    tree = dict(tree)
    for entry in in_order(delta):
        parent = entry.path.rpartition("/")[0]
        there = not parent or (parent in tree and tree[parent].kind == "dir")
        assert there or entry.kind == "delete", f"{entry.path}: parent is missing"
        if not (entry.kind == "dir" and entry.path in tree and tree[entry.path].kind == "dir"):
            tree = {p: n for p, n in tree.items() if p != entry.path and not p.startswith(entry.path + "/")}
        if entry.kind != "delete":
            tree[entry.path] = Node(entry.kind, entry.mode, entry.digest, entry.target)
    return tree


def delta_from(base: BaseTree, old: Tree, new: Tree) -> Delta:
    def relative(tree: Tree) -> Changes:
        paths = tree.keys() | base.nodes.keys()
        return {path: tree.get(path) for path in paths if tree.get(path) != base.nodes.get(path)}

    entries = []
    for path, node in changed(relative(old), relative(new), base):
        if node is None:
            entries.append(DeltaEntry(path, "delete"))
        else:
            entries.append(DeltaEntry(path, node.kind, node.mode, digest=node.digest, target=node.target))
    return Delta(tuple(entries))


@given(start=CHANGES, steps=st.lists(CHANGES, max_size=4))
def test_composed_deltas_have_the_effect_of_all(
    start: list[tuple[str, Node | None]], steps: list[list[tuple[str, Node | None]]]
) -> None:
    base: Tree = {}
    for path, node in start:
        base = put(base, path, node)
    tree, deltas = base, []
    for step in steps:
        before = tree
        for path, node in step:
            tree = put(tree, path, node)
        deltas.append(delta_from(BaseTree(base), before, tree))
        assert apply(before, deltas[-1]) == tree
    whole = compose(deltas)
    check(whole)
    assert apply(base, whole) == tree
    assert apply(base, compose([compose(deltas[:2]), *deltas[2:]])) == tree


def test_skipped_is_never_lost() -> None:
    assert compose([Delta(skipped=("fifo: x",)), Delta(skipped=("socket: y",))]).skipped == ("fifo: x", "socket: y")


@pytest.mark.parametrize(
    "entry",
    [
        DeltaEntry("", "dir", 0o755),
        DeltaEntry("/etc/passwd", "delete"),
        DeltaEntry("a/../../b", "delete"),
        DeltaEntry("a/", "dir", 0o755),
        DeltaEntry("a\0b", "delete"),
        DeltaEntry("l", "symlink"),
        DeltaEntry("f", "file", 0o644),
    ],
)
def test_malformed_entries_are_refused_before_anything_is_written(entry: DeltaEntry) -> None:
    with pytest.raises(SandboxSpecError):
        check(Delta((entry,)))


def test_same_change_twice_is_refused() -> None:
    with pytest.raises(SandboxSpecError, match="twice"):
        check(Delta((DeltaEntry("a", "dir", 0o755), DeltaEntry("a", "dir", 0o700))))
