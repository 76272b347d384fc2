"""A recipe's set-up commands, run in a sandbox (`SetupRunner` of `sandbox_images.builder`).

What the commands change in the workspace becomes a layer. A layer can add and replace but not remove, so a command that
removes something of the image is refused by name; so is one that fails.
"""

import asyncio
from collections.abc import Mapping, Sequence

from odradek.actors.environment.protocol import ExecRequest, SandboxDriver, SandboxSpec
from odradek.sandbox_images.builder import SetupRunner
from odradek.sandbox_images.errors import RecipeError
from odradek.sandbox_images.store import WORKSPACE_PREFIX
from odradek.sandbox_images.tree import FileSpec

SETUP_DEADLINE_S = 1800.0
"""Seconds for all commands of one recipe. Too low: a compilation is cut; too high: a hang blocks the build."""


def setup_runner(driver: SandboxDriver, loop: asyncio.AbstractEventLoop) -> SetupRunner:
    """For `build` in another thread than the driver's loop."""

    def run(image: str, commands: Sequence[str]) -> Mapping[str, FileSpec]:
        return asyncio.run_coroutine_threadsafe(run_setup(driver, image, commands), loop).result(SETUP_DEADLINE_S)

    return run


async def run_setup(driver: SandboxDriver, image: str, commands: Sequence[str]) -> dict[str, FileSpec]:
    """What the commands change, by path in the image."""
    sandbox = await driver.create(SandboxSpec(image, lifetime_s=SETUP_DEADLINE_S, labels={"purpose": "set-up"}))
    try:
        for command in commands:
            result = await sandbox.exec(ExecRequest(shell=command, timeout_s=SETUP_DEADLINE_S, merge_output=True))
            if result.exit_code != 0:
                shown = result.stdout[-1000:].strip()
                raise RecipeError(f"set-up command {command!r} ended with {result.exit_code}: {shown}")
        delta = await sandbox.diff()
    finally:
        await sandbox.destroy()
    if delta.skipped:
        raise RecipeError(f"set-up left what no layer can hold: {', '.join(delta.skipped)}")
    files: dict[str, FileSpec] = {}
    for entry in delta.entries:
        if entry.kind == "delete":
            raise RecipeError(f"set-up removed {entry.path!r}; a layer can only add and replace")
        files[f"{WORKSPACE_PREFIX}/{entry.path}"] = FileSpec(
            content=entry.content or b"", mode=entry.mode, target=entry.target, directory=entry.kind == "dir"
        )
    return files
