"""`odradek down` also removes what a killed sandbox driver left: processes, mounts, cgroups, directories."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract.sandbox_contract import demo_spec, sandbox_images

from odradek.actors.environment.protocol import SandboxSpec
from odradek.infra.config.load import load
from odradek.infra.config.services import reap_sandboxes, stack_of
from odradek.infra.errors import StackError
from odradek.sandbox_images.store import ImageStore

__all__ = ["demo_spec", "sandbox_images"]

pytestmark = pytest.mark.contract

HOST = """
import asyncio, sys
from pathlib import Path
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.sandbox_images.store import ImageStore

async def main(state, images, image):
    driver = NsDriver(Path(state), ImageStore(Path(images)))
    await driver.start()
    sandbox = await driver.create(SandboxSpec(image))
    await sandbox.exec(ExecRequest(shell="setsid sleep 300 & echo > f"))
    print(sandbox.pid, driver.zygote_pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main(*sys.argv[1:]))
"""


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _host(data: Path, images: ImageStore, image: str) -> tuple[subprocess.Popen[str], int, int]:
    state = data / "sandboxes" / "environment-0"
    command = [sys.executable, "-c", HOST, str(state), str(images.root), image]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    sandbox, zygote = map(int, host.stdout.readline().split())
    return host, sandbox, zygote


def test_down_removes_sandboxes_of_a_killed_driver(
    tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
) -> None:
    """kill -9 of driver and helper at once, so that nobody but the next `down` is left to clean up."""
    host, sandbox, zygote = _host(tmp_path, sandbox_images, demo_spec.image)
    os.kill(zygote, signal.SIGKILL)
    host.kill()
    host.communicate(timeout=30)
    state = tmp_path / "sandboxes" / "environment-0"
    assert list(state.glob("ns-*")), "the driver must have left something for this test to mean anything"
    assert stack_of(load(environment={}, data=tmp_path).config).down() == ()
    assert list(state.glob("ns-*")) == []
    assert _gone(sandbox)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_a_live_driver_is_not_reaped(tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec) -> None:
    """A driver that still works keeps its sandboxes; the message says why they stay."""
    host, sandbox, _ = _host(tmp_path, sandbox_images, demo_spec.image)
    try:
        with pytest.raises(StackError, match="still in use by a live driver"):
            reap_sandboxes(tmp_path, wait_s=0.3)
        assert not _gone(sandbox)
    finally:
        host.kill()
        host.communicate(timeout=30)
    reap_sandboxes(tmp_path)
    assert _gone(sandbox)
