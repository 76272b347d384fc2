"""Build a recipe into an image of the store.

Each step of the recipe is a layer of its own, so that images share what they have in common. Set-up commands run in a
sandbox of the image built so far, never on the host; the caller lends the sandbox as a `SetupRunner`, because this
room knows no driver. A finished build is remembered under the recipe and the host's fingerprint; building again is
a look-up.
"""

import hashlib
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import msgspec

from odradek.sandbox_images.errors import RecipeError
from odradek.sandbox_images.host_base import fill_host_base, fingerprint
from odradek.sandbox_images.recipe import Recipe, RecipeRepo
from odradek.sandbox_images.store import Image, ImageStore
from odradek.sandbox_images.tree import FileSpec

BUILDER_VERSION = "1"
"""Part of the build key: raise it when the same recipe must give another image."""

BASE_ENV = {"PATH": "/usr/bin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8"}
"""All that a command's environment has before image and spec add to it."""

GIT_DEADLINE_S = 600.0
"""Seconds for fetching a repository. Too low: a large one can't be built; too high: a dead server blocks the build."""


class SetupRunner(Protocol):
    """Runs shell lines in a sandbox of `image` and returns what they changed, by absolute path without the slash."""

    def __call__(self, image: str, commands: Sequence[str]) -> Mapping[str, FileSpec]: ...


def build(recipe: Recipe, store: ImageStore, run_setup: SetupRunner | None = None) -> str:
    """Digest of the recipe's image, built now unless it is in the store."""
    marks = [BUILDER_VERSION, fingerprint(recipe.packages), msgspec.json.encode(recipe, order="deterministic").decode()]
    key = hashlib.sha256("\0".join(marks).encode()).hexdigest()
    known = store.built(key)
    if known is not None:
        return known
    layers = [store.layer_from_tree(lambda tree: fill_host_base(tree, recipe.packages))]
    if recipe.files:
        layers.append(store.layer_from_files(_files(recipe), prefix=""))
    if recipe.repo is not None:
        layers.append(store.layer_from_files(_repository(recipe.repo)))
    env = {**BASE_ENV, **recipe.env}
    if recipe.setup:
        if run_setup is None:
            raise RecipeError(f"recipe {recipe.name!r} has set-up commands, and no sandbox was lent to run them in")
        below = store.put_image(Image(layers=tuple(layers), env=env, name=recipe.name))
        layers.append(store.layer_from_files(run_setup(below, recipe.setup), prefix=""))
    digest = store.put_image(Image(layers=tuple(layers), env=env, name=recipe.name))
    store.remember_built(key, digest)
    return digest


def _files(recipe: Recipe) -> dict[str, FileSpec]:
    return {item.path.lstrip("/"): FileSpec(content=item.text.encode(), mode=item.mode) for item in recipe.files}


def _repository(repo: RecipeRepo) -> dict[str, FileSpec]:
    """Files of the commit. Objects, tags and reflogs stay behind: a later commit may hold the solution."""
    if len(repo.commit) not in (40, 64) or not set(repo.commit) <= set("0123456789abcdef"):
        raise RecipeError(f"repository {repo.url}: {repo.commit!r} is not a full commit hash; branches and tags move")
    with TemporaryDirectory() as scratch:
        clone = Path(scratch, "clone.git")
        _git("clone", "--quiet", "--bare", "--", repo.url, str(clone))
        archive = _git("-C", str(clone), "archive", "--format=tar", repo.commit)
    files: dict[str, FileSpec] = {}
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        for member in tar:
            if member.isdir():
                files[member.name] = FileSpec(directory=True, mode=0o755)
            elif member.issym():
                files[member.name] = FileSpec(target=member.linkname)
            elif member.isfile():
                content = tar.extractfile(member)
                assert content is not None
                files[member.name] = FileSpec(content=content.read(), mode=0o755 if member.mode & 0o100 else 0o644)
    return files


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], capture_output=True, timeout=GIT_DEADLINE_S, check=False)
    if done.returncode != 0:
        raise RecipeError(f"git {arguments[0]} ended with {done.returncode}: {done.stderr.decode()[-500:].strip()}")
    return done.stdout
