"""`odradek down` also removes what a killed sandbox driver left: processes, mounts, cgroups, directories."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from contract.sandbox_contract import demo_spec, sandbox_images
from support.waiting import eventually_blocking

from odradek.actors.environment.ns.cgroup import remove_parents
from odradek.actors.environment.ns.preflight import find_cgroups
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

async def main(state, images, image, group):
    if group:
        (Path(group) / "cgroup.procs").write_text("0")
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


def _host(data: Path, images: ImageStore, image: str, group: str = "") -> tuple[subprocess.Popen[str], int, int]:
    """A driver with a sandbox; `group`: the cgroup it goes into first."""
    state = data / "sandboxes" / "environment-0"
    command = [sys.executable, "-c", HOST, str(state), str(images.root), image, group]
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


def _groups(data: Path) -> list[Path]:
    """The cgroups that the driver below this data folder noted."""
    (lock,) = (data / "sandboxes").glob("*/ns-*.lock")
    return [Path(path) for path in json.loads(lock.read_bytes() or b"[]")]


needs_cgroups = pytest.mark.skipif(
    os.geteuid() != 0 or find_cgroups() is None, reason="this host hands no cgroups to this user"
)


@needs_cgroups
def test_down_takes_the_groups_of_a_killed_driver_that_was_in_another_group(
    tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
) -> None:
    """Where `down` itself may make groups says nothing of where the driver made its own: another login, say."""
    place = find_cgroups()
    assert place is not None
    other = place.parents["memory"] / f"odr-test-{os.getpid()}"
    other.mkdir()
    try:
        host, _, zygote = _host(tmp_path, sandbox_images, demo_spec.image, str(other))
        os.kill(zygote, signal.SIGKILL)
        host.kill()
        host.communicate(timeout=30)
        groups = _groups(tmp_path)
        assert groups and all(group.is_dir() for group in groups)
        assert place.version == 2 or any(group.is_relative_to(other) for group in groups)
        stack_of(load(environment={}, data=tmp_path).config).down()
        assert not any(group.exists() for group in groups)
    finally:
        remove_parents([str(other)], 5.0)


@needs_cgroups
def test_a_group_that_its_zygote_could_not_remove_is_taken_by_the_next_down(
    tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
) -> None:
    """The lock file names the groups and goes last: what is left is known to whoever comes next."""
    host, _, zygote = _host(tmp_path, sandbox_images, demo_spec.image)
    groups = _groups(tmp_path)
    with subprocess.Popen(["sleep", "300"]) as stays:
        try:
            for group in groups:
                (group / "stays").mkdir(exist_ok=True)
                (group / "stays" / "cgroup.procs").write_text(str(stays.pid))
            host.kill()
            host.communicate(timeout=30)
            eventually_blocking(lambda: _gone(zygote), "the zygote to end")
            assert all(group.is_dir() for group in groups)
            stack_of(load(environment={}, data=tmp_path).config).down()
            assert stays.wait(10) == -signal.SIGKILL
        finally:
            stays.kill()
    assert not any(group.exists() for group in groups)
    assert list((tmp_path / "sandboxes" / "environment-0").glob("ns-*")) == []


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
