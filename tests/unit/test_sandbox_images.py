"""Image store, recipes and the base `host`: digests say what is inside, layers are whole or absent."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odradek.sandbox_images.builder import build
from odradek.sandbox_images.errors import ImageCorruptError, ImageError, ImageNotFoundError, RecipeError
from odradek.sandbox_images.recipe import Recipe, RecipeFile, RecipeRepo, load_recipe
from odradek.sandbox_images.store import Image, ImageStore, store_owner
from odradek.sandbox_images.tree import FileSpec, TreeEntry, scan_tree, tree_digest

RECIPES = Path(__file__).parents[2] / "sandbox_images/recipes"


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@given(
    st.permutations([TreeEntry("a", "dir", 0o755), TreeEntry("a/b", "file", 0o644, "d"), TreeEntry("c", "symlink", 0)])
)
def test_digest_does_not_depend_on_order(entries: list[TreeEntry]) -> None:
    assert tree_digest(entries) == tree_digest(sorted(entries, key=lambda e: e.path))


def test_digest_depends_on_path_kind_mode_content_and_target() -> None:
    base = TreeEntry("a", "file", 0o644, "d")
    others = [
        TreeEntry("b", "file", 0o644, "d"),
        TreeEntry("a", "dir", 0o644, "d"),
        TreeEntry("a", "file", 0o755, "d"),
        TreeEntry("a", "file", 0o644, "e"),
        TreeEntry("a", "file", 0o644, "d", target="t"),
    ]
    assert len({tree_digest([entry]) for entry in (base, *others)}) == 6


def test_layer_of_files_is_what_was_asked(store: ImageStore) -> None:
    digest = store.layer_from_files(
        {
            "a/b.txt": b"text",
            "run": FileSpec(content=b"#!", mode=0o755),
            "ln": FileSpec(target="a//b.txt"),
            "void": FileSpec(directory=True, mode=0o700),
        }
    )
    tree = store.layer_path(digest)
    assert scan_tree(tree) == store.manifest(digest)
    assert (tree / "workspace/run").stat().st_mode & 0o777 == 0o755
    assert os.readlink(tree / "workspace/ln") == "a//b.txt"  # noqa: PTH115 - verbatim
    assert (tree / "workspace/void").stat().st_mode & 0o777 == 0o700
    assert {path.stat(follow_symlinks=False).st_uid for path in tree.rglob("*")} == {store_owner()}
    assert store.layer_from_files({"a/b.txt": b"text"}) != digest


def test_same_files_are_the_same_layer_on_any_store(store: ImageStore, tmp_path: Path) -> None:
    files = {"x/y": b"1", "x/z": b"2"}
    assert store.layer_from_files(files) == ImageStore(tmp_path / "other").layer_from_files(
        dict(reversed(files.items()))
    )
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("name", ["/abs", "../up", "a/../../b", "", "a\0b"])
def test_layer_files_stay_in_their_layer(store: ImageStore, name: str) -> None:
    with pytest.raises(ImageError):
        store.layer_from_files({name: b""})


def test_a_file_can_not_be_a_parent(store: ImageStore) -> None:
    with pytest.raises(ImageError, match="parent"):
        store.layer_from_files({"a": b"", "a/b": b""})


def test_what_is_not_there_is_said(store: ImageStore) -> None:
    for digest in ("0" * 64, "short", "../../etc"):
        with pytest.raises(ImageNotFoundError):
            store.layer_path(digest)
    with pytest.raises(ImageNotFoundError):
        store.image("0" * 64)
    with pytest.raises(ImageNotFoundError):
        store.put_image(Image(layers=("0" * 64,)))


def test_changed_image_file_is_noticed(store: ImageStore) -> None:
    digest = store.put_image(Image(layers=(store.layer_from_files({"a": b""}),)))
    path = store.root / "images" / digest
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ImageCorruptError, match=digest):
        store.image(digest)


def test_every_shipped_recipe_loads() -> None:
    recipes = [load_recipe(path) for path in RECIPES.glob("*.toml")]
    assert "demo" in {recipe.name for recipe in recipes}


@pytest.mark.parametrize(
    ("text", "said"), [('name = "x"\nbas = "host"', "bas"), ("name = 1", "name"), ("name = ", "recipe"), ("", "name")]
)
def test_recipe_errors_name_file_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=f"bad.toml.*{said}|{said}.*bad.toml"):
        load_recipe(path)


def test_build_is_remembered_and_layers_are_shared(store: ImageStore) -> None:
    recipe = Recipe(name="s", packages=("shell",), files=(RecipeFile("/etc/motd", "hi\n"),), env={"A": "1"})
    digest = build(recipe, store)
    assert build(recipe, store) == digest
    other = build(msgspec.structs.replace(recipe, env={"A": "2"}), store)
    assert other != digest
    assert store.image(other).layers == store.image(digest).layers
    assert (store.layer_path(store.image(digest).layers[1]) / "etc/motd").read_text() == "hi\n"
    assert store.image(digest).env == {"PATH": "/usr/bin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8", "A": "1"}


def test_unknown_package_and_set_up_without_sandbox_are_refused(store: ImageStore) -> None:
    with pytest.raises(RecipeError, match="emacs"):
        build(Recipe(name="x", packages=("emacs",)), store)
    with pytest.raises(RecipeError, match="set-up"):
        build(Recipe(name="x", packages=("shell",), setup=("true",)), store)


def test_repository_comes_without_its_history(store: ImageStore, tmp_path: Path) -> None:
    """SWE-bench 465: later commits, which hold the fix, were reachable in the sandbox."""
    repo = tmp_path / "repo"
    git = ["git", "-C", str(repo), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run(["git", "init", "-q", str(repo)], check=True)
    (repo / "bug.py").write_text("bug\n")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "bug"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (repo / "bug.py").write_text("fix\n")
    subprocess.run([*git, "commit", "-qam", "fix"], check=True)
    recipe = Recipe(name="r", packages=("shell",), repo=RecipeRepo(str(repo), commit))
    layer = store.image(build(recipe, store)).layers[-1]
    files = {entry.path for entry in store.manifest(layer)}
    assert files == {"workspace", "workspace/bug.py"}
    assert (store.layer_path(layer) / "workspace/bug.py").read_text() == "bug\n"
    with pytest.raises(RecipeError, match="full commit hash"):
        build(Recipe(name="r", packages=("shell",), repo=RecipeRepo(str(repo), "main")), store)
