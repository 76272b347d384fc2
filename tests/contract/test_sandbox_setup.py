"""Set-up commands of a recipe run in a sandbox, never on the host."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from odradek.actors.environment import start
from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.actors.environment.setup import run_setup, setup_runner
from odradek.actors.session.ports import WorkspaceStart
from odradek.sandbox_images.builder import build
from odradek.sandbox_images.errors import RecipeError
from odradek.sandbox_images.recipe import Recipe
from odradek.sandbox_images.store import Image, ImageStore
from odradek.streams.blobs import BlobStore, S3Config, S3Store

pytestmark = pytest.mark.contract


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[NsDriver]:
    driver = NsDriver(tmp_path / "state", ImageStore(tmp_path / "images"))
    await driver.start()
    yield driver
    await driver.close()


async def test_what_set_up_makes_is_in_the_image(driver: NsDriver) -> None:
    commands = ("mkdir -p out/empty; echo made > out/file; chmod 700 out/file", "ln -s out/file link; cat link")
    recipe = Recipe(name="set-up", packages=("shell",), setup=commands)
    run = setup_runner(driver, asyncio.get_running_loop())
    image = await asyncio.to_thread(build, recipe, driver.images, run)
    assert await driver.list() == ()
    sandbox = await driver.create(SandboxSpec(image))
    result = await sandbox.exec(ExecRequest(shell="cat link; stat -c %a out/file; ls -d out/empty; id -u > out/me"))
    assert result.stdout == "made\n700\nout/empty\n"
    assert [entry.path for entry in (await sandbox.diff()).entries] == ["out/me"]
    assert await asyncio.to_thread(build, recipe, driver.images, run) == image


async def test_a_session_has_what_the_set_up_of_its_image_s_recipe_made(
    driver: NsDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built on first use, by whoever opens a sandbox of it; a set-up that fails is the image's fault, by name."""
    recipes = {"made": "echo made > file", "broken": "exit 3"}
    for name, command in recipes.items():
        (tmp_path / f"{name}.toml").write_text(f'name = "{name}"\npackages = ["shell"]\nsetup = ["{command}"]\n')
    monkeypatch.setattr(start, "RECIPES", tmp_path)
    blobs = BlobStore(S3Store(S3Config(endpoint="", bucket="none")))
    factory = start.SandboxFactory(driver, driver.images, blobs)
    opening = [factory.open(WorkspaceStart("made", {}), [], f"session-{number}") for number in range(2)]
    for sandbox in await asyncio.gather(*opening):
        assert await sandbox.read("file") == b"made\n"
        await sandbox.destroy()
    with pytest.raises(SandboxSpecError, match="image 'broken': set-up command 'exit 3' ended with 3"):
        await factory.open(WorkspaceStart("broken", {}), [], "session")
    assert await driver.list() == ()


async def test_set_up_that_fails_is_refused(driver: NsDriver) -> None:
    recipe = Recipe(name="bad", packages=("shell",), setup=("echo broken; exit 3",))
    with pytest.raises(RecipeError, match="broken"):
        await asyncio.to_thread(build, recipe, driver.images, setup_runner(driver, asyncio.get_running_loop()))
    assert await driver.list() == ()


async def test_set_up_that_removes_is_refused(driver: NsDriver) -> None:
    below = driver.images.image(await asyncio.to_thread(build, Recipe(name="s", packages=("shell",)), driver.images))
    layer = driver.images.layer_from_files({"keep": b""})
    image = driver.images.put_image(Image(layers=(*below.layers, layer), env=below.env))
    with pytest.raises(RecipeError, match="removed 'keep'"):
        await run_setup(driver, image, ["rm keep"])
    assert await driver.list() == ()
