"""Recipes: what an image holds, as data.

A recipe is a TOML file with the fields of `Recipe`; unknown keys are refused. Nothing in it may need the network when
the image runs; a repository is fetched when it is built.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from odradek.sandbox_images.errors import RecipeError


class RecipeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file with its text, at an absolute path of the image."""

    path: str
    text: str
    mode: int = 0o644


class RecipeRepo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Git repository at one commit, put into the workspace without its history: later commits hold the answers."""

    url: str
    commit: str
    """Full hash. A branch or tag may move and is refused."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to build, in this order: base, packages, files, repository, set-up commands."""

    name: str
    base: Literal["host"] = "host"
    """`host`: programs and Python of the building machine, copied with the libraries they need."""
    packages: tuple[str, ...] = ("python", "shell")
    """Names from `host_base.PACKAGES`."""
    files: tuple[RecipeFile, ...] = ()
    repo: RecipeRepo | None = None
    setup: tuple[str, ...] = ()
    """Shell lines, run in a sandbox of the image built so far; what they change becomes its top layer."""
    env: dict[str, str] = {}


RECIPES = Path(__file__).parent / "recipes"
"""The recipes that come with the product; each is built on first use."""


@cache
def shipped() -> frozenset[str]:
    """Their names."""
    return frozenset(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(path: Path) -> Recipe:
    """Read a recipe; the error names the file and the key."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Recipe)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RecipeError(f"recipe {path}: {error}") from error
