"""The tools over a real sandbox: the same rows as over a directory of this host."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.sandbox_contract import sandbox_images
from contract.tools_contract import OUTSIDE_TEXT, ToolsContract

from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import Sandbox, SandboxSpec
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import run_call
from odradek.actors.tools.sandbox_workspace import SandboxWorkspace
from odradek.sandbox_images.builder import build
from odradek.sandbox_images.recipe import Recipe
from odradek.sandbox_images.store import ImageStore

__all__ = ["sandbox_images"]

pytestmark = pytest.mark.contract


@pytest.fixture
async def sandbox(tmp_path: Path, sandbox_images: ImageStore) -> AsyncIterator[Sandbox]:
    driver = NsDriver(tmp_path / "state", sandbox_images)
    await driver.start()
    recipe = Recipe(name="tools", packages=("python", "shell", "text"), env={"PYTHONDONTWRITEBYTECODE": "1"})
    sandbox = await driver.create(SandboxSpec(image=build(recipe, sandbox_images)))
    yield sandbox
    await driver.close()


@pytest.fixture
def workspace(sandbox: Sandbox) -> SandboxWorkspace:
    return SandboxWorkspace(sandbox)


@pytest.fixture
async def outside(workspace: SandboxWorkspace) -> str:
    ended = await workspace.exec(f"printf '{OUTSIDE_TEXT.decode()}' > /tmp/secret.txt", 60.0, lambda _: None)
    assert ended.code == 0
    return "/tmp/secret.txt"


class TestToolsInSandbox(ToolsContract):
    """Plus what only a sandbox can do: be gone, and tell what changed."""

    async def test_pure_tools_leave_no_delta_and_others_exactly_theirs(
        self, sandbox: Sandbox, workspace: SandboxWorkspace
    ) -> None:
        await workspace.write("a.py", b"x = 1\n")
        await sandbox.diff(incremental=True)
        for name, arguments in [
            ("read_file", {"path": "a.py"}),
            ("list_dir", {}),
            ("glob", {"pattern": "*.py"}),
            ("grep", {"pattern": "x"}),
            ("semantic_search", {"query": "x"}),
            ("read_lints", {}),
            ("todo_write", {"items": "[]"}),
        ]:
            assert not (await self.call(workspace, name, **arguments)).is_error
        assert (await sandbox.diff(incremental=True)).entries == ()
        await self.call(workspace, "edit_file", path="a.py", old="1", new="2")
        (entry,) = (await sandbox.diff(incremental=True)).entries
        assert (entry.path, entry.kind) == ("a.py", "file")

    async def test_a_sandbox_that_is_gone_is_no_tool_result(
        self, sandbox: Sandbox, workspace: SandboxWorkspace
    ) -> None:
        await sandbox.destroy()
        for name, arguments in [
            ("read_file", {"path": "a.py"}),
            ("list_dir", {}),
            ("write_file", {"path": "a", "content": "x"}),
            ("run_terminal", {"command": "true"}),
            ("run_terminal", {"command": "true", "background": "true"}),
        ]:
            with pytest.raises(SandboxInfraError):
                await run_call(workspace, name, arguments, Limits())
