"""Set-up commands of a recipe run in a sandbox, never on the host."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.actors.environment.setup import run_setup, setup_runner
from odradek.sandbox_images.builder import build
from odradek.sandbox_images.errors import RecipeError
from odradek.sandbox_images.recipe import Recipe
from odradek.sandbox_images.store import Image, ImageStore

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
