"""DESIGN section 1.2, the workspace part: workspace = image + deltas, whatever a command did to it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract.sandbox_contract import demo_spec, sandbox_images
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from odradek.actors.environment.delta import Delta, compose
from odradek.actors.environment.errors import SandboxPathError
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, Sandbox, SandboxSpec
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.session.ports import WorkspaceStart
from odradek.sandbox_images.store import ImageStore
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.events.sessions import FileChange, WorkspaceDelta

__all__ = ["demo_spec", "sandbox_images"]

pytestmark = pytest.mark.contract

OPERATE = """
import json, os, shutil, sys
for kind, path, other, mode in json.loads(sys.argv[1]):
    try:
        if kind == 'write':
            open(path, 'w').write(other)
        elif kind == 'append':
            open(path, 'a').write(other)
        elif kind == 'mkdir':
            os.makedirs(path)
        elif kind == 'remove':
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif kind == 'move':
            shutil.move(path, other)
        elif kind == 'link':
            os.symlink(other, path)
        elif kind == 'hardlink':
            os.link(path, other)
        elif kind == 'chmod':
            os.chmod(path, mode)
    except OSError:
        pass
"""

NAMES = st.sampled_from(["a", "b", "src", "readme.md"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join) | st.sampled_from(["src/deep", "src/deep/er/leaf.txt"])
KINDS = st.sampled_from(["write", "append", "mkdir", "remove", "move", "link", "hardlink", "chmod"])
MODES = st.sampled_from([0o644, 0o600, 0o755, 0o700, 0o400, 0o555, 0o000, 0o1777])
OPERATIONS = st.lists(st.tuples(KINDS, PATHS, PATHS, MODES), min_size=1, max_size=12)
STEPS = st.lists(st.tuples(OPERATIONS, st.sampled_from(["diff", "fork", "fork at work", "nothing"])), max_size=5)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def driver(
    loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory, sandbox_images: ImageStore
) -> Iterator[NsDriver]:
    driver = NsDriver(tmp_path_factory.mktemp("delta"), sandbox_images)
    loop.run(driver.start())
    yield driver
    loop.run(driver.close())


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each example starts processes: shrinking takes minutes
)
@given(steps=STEPS)
def test_deltas_rebuild_the_workspace_whatever_was_done_to_it(
    steps: list[tuple[list[tuple[str, str, str, int]], str]],
    loop: asyncio.Runner,
    driver: NsDriver,
    demo_spec: SandboxSpec,
) -> None:
    loop.run(_rebuilds(driver, demo_spec, steps))


async def _rebuilds(
    driver: NsDriver, spec: SandboxSpec, steps: list[tuple[list[tuple[str, str, str, int]], str]]
) -> None:
    made: list[Sandbox] = [await driver.create(spec)]
    deltas: list[Delta] = []
    for operations, then in steps:
        result = await made[0].exec(ExecRequest(argv=("python3", "-S", "-c", OPERATE, json.dumps(operations))))
        assert result.exit_code == 0, result.stderr
        if then == "diff":
            deltas.append(await made[0].diff(incremental=True))
        elif then.startswith("fork"):
            deltas.append(await made[0].diff(incremental=True))
            if then == "fork at work":
                await made[0].exec(ExecRequest(shell="sleep 300 &"))
            fork = await made[0].fork()
            await made.pop(0).destroy()
            made.insert(0, fork)
    deltas.append(await made[0].diff(incremental=True))
    whole = await made[0].diff()
    made.append(await _rebuilt(driver, spec, [whole]))
    made.append(await _rebuilt(driver, spec, deltas))
    step_by_step = await driver.create(spec)
    for delta in deltas:
        await step_by_step.apply(delta)
    made.append(step_by_step)
    for sandbox in made[1:]:
        assert (await sandbox.diff()).entries == whole.entries
        assert (await sandbox.diff(incremental=True)).entries == ()
    trees = [await _tree(sandbox) for sandbox in made]
    assert trees[1:] == trees[:1] * 3
    for sandbox in made:
        await sandbox.destroy()
    assert compose([whole]).entries == whole.entries


async def _rebuilt(driver: NsDriver, spec: SandboxSpec, deltas: list[Delta]) -> Sandbox:
    """As `SandboxFactory.open` does it."""
    sandbox = await driver.create(spec)
    await sandbox.apply(compose(deltas))
    await sandbox.diff(incremental=True)
    return sandbox


async def _tree(sandbox: Sandbox) -> dict[str, tuple[str, int, bytes]]:
    """Modes first as they are, then, with everything opened, contents."""
    found: dict[str, tuple[str, int, bytes]] = {}
    for entry in await sandbox.list(recursive=True):
        found[f"closed/{entry.path}"] = (entry.kind, entry.mode, b"")
    await sandbox.exec(ExecRequest(shell="chmod -R u+rwX . 2>/dev/null"))
    for entry in await sandbox.list(recursive=True):
        content = await sandbox.read(entry.path) if entry.kind == "file" else entry.target.encode()
        found[entry.path] = (entry.kind, 0 if entry.kind == "symlink" else entry.mode, content)
    return found


async def test_rebuild_that_fails_leaves_no_sandbox(
    tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
) -> None:
    driver = NsDriver(tmp_path / "state", sandbox_images)
    await driver.start()
    factory = SandboxFactory(driver, sandbox_images, BlobStore(S3Store(S3Config(endpoint="", bucket="none"))))
    bad = WorkspaceDelta(changes=[FileChange(path="readme.md/below", kind="file", content=b"")])
    start = WorkspaceStart(demo_spec.image, {"readme.md": b"x"})
    with pytest.raises(SandboxPathError):
        await factory.open(start, [bad], "rebuilt")
    assert await driver.list() == ()
    await driver.close()
