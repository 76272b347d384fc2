"""What the parts of the sandbox contract share: an image, a task tree, and looks at a sandbox."""

import pytest

from odradek.actors.environment.errors import SandboxPathError
from odradek.actors.environment.protocol import ExecRequest, ExecResult, Sandbox, SandboxDriver, SandboxSpec
from odradek.sandbox_images.builder import build
from odradek.sandbox_images.recipe import Recipe
from odradek.sandbox_images.store import ImageStore
from odradek.sandbox_images.tree import FileSpec

NEVER_S = 300
"""How long the things sleep for which nobody may wait. Far above any delay of a loaded machine."""

TASK_FILES: dict[str, bytes | FileSpec] = {
    "readme.md": b"hello\n",
    "src/main.py": b"print('main')\n",
    "src/deep/er/leaf.txt": b"leaf\n",
    "run.sh": FileSpec(content=b"#!/bin/sh\necho ran\n", mode=0o755),
    "link": FileSpec(target="readme.md"),
}


@pytest.fixture(scope="session")
def sandbox_images(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def demo_spec(sandbox_images: ImageStore) -> SandboxSpec:
    """A base with Python and shell, and a small task tree over it."""
    recipe = Recipe(name="contract", packages=("python", "shell", "text"), env={"PYTHONDONTWRITEBYTECODE": "1"})
    return SandboxSpec(image=build(recipe, sandbox_images), layers=(sandbox_images.layer_from_files(TASK_FILES),))


async def sh(sandbox: Sandbox, line: str, timeout_s: float = 60.0) -> ExecResult:
    return await sandbox.exec(ExecRequest(shell=line, timeout_s=timeout_s))


async def tree(sandbox: Sandbox) -> dict[str, tuple[str, int, bytes]]:
    """Everything in the workspace that a delta carries."""
    found: dict[str, tuple[str, int, bytes]] = {}
    for entry in await sandbox.list(recursive=True):
        content = await sandbox.read(entry.path) if entry.kind == "file" else entry.target.encode()
        found[entry.path] = (entry.kind, 0 if entry.kind == "symlink" else entry.mode, content)
    return found


async def no_process(sandbox: Sandbox) -> bool:
    return (await sandbox.metrics()).processes == 0


async def exists(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.stat(path)
    except SandboxPathError:
        return False
    return True


async def larger(sandbox: Sandbox, path: str, size: int) -> bool:
    return (await sandbox.stat(path)).size > size


class OnOneSandbox:
    """A part of the contract; its subclass brings the `driver` fixture."""

    @pytest.fixture
    async def sandbox(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> Sandbox:
        return await driver.create(demo_spec)
