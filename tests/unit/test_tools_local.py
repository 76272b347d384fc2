"""The tools over a directory of this host."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.tools_contract import OUTSIDE_TEXT, ToolsContract
from support.local_workspace import LocalWorkspace


@pytest.fixture
async def workspace(tmp_path: Path) -> AsyncIterator[LocalWorkspace]:
    (tmp_path / "workspace").mkdir()
    workspace = LocalWorkspace(tmp_path / "workspace")
    yield workspace
    await workspace.close()


@pytest.fixture
def outside(tmp_path: Path) -> str:
    (tmp_path / "beyond").mkdir()
    file = tmp_path / "beyond" / "secret.txt"
    file.write_bytes(OUTSIDE_TEXT)
    return str(file)


class TestToolsLocal(ToolsContract):
    """Plus what only an unisolated workspace must prove."""

    async def test_commands_see_nothing_of_this_process(
        self, workspace: LocalWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HARNESS_ONLY", "visible")
        assert "HARNESS_ONLY" not in await self.text(workspace, "run_terminal", command="env")

    async def test_close_ends_jobs_and_background_children(self, tmp_path: Path) -> None:
        root = tmp_path / "other"
        root.mkdir()
        workspace = LocalWorkspace(root)
        loop = "while true; do echo x >> {}; sleep 0.05; done"
        await self.text(workspace, "run_terminal", command=loop.format("job"), background="true")
        await self.sh(workspace, f"({loop.format('child')}) & sleep 0.3")
        await workspace.close()
        sizes = [(root / name).stat().st_size for name in ("job", "child")]
        await self.sh(workspace, "sleep 0.5")
        assert sizes == [(root / name).stat().st_size for name in ("job", "child")]
