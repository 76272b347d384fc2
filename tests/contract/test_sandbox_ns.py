"""Driver `ns` under the contract, as the user who runs the tests, with its own regressions."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.sandbox_contract import SandboxContract, demo_spec, sandbox_images, sh
from support.waiting import eventually

from odradek.actors.environment.errors import SandboxAdmissionError, SandboxError, SandboxInfraError
from odradek.actors.environment.ns.admission import NsConfig
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.ns.instance import start_ticks
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.sandbox_images.store import SANDBOX_UID, ImageStore

__all__ = ["demo_spec", "sandbox_images"]

pytestmark = pytest.mark.contract

CLIENT = """
import asyncio, sys
from pathlib import Path
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.sandbox_images.store import ImageStore

async def main(state, images, image):
    driver = NsDriver(Path(state), ImageStore(Path(images)))
    await driver.start()
    for _ in range(3):
        sandbox = await driver.create(SandboxSpec(image))
        await sandbox.exec(ExecRequest(shell="setsid sleep 300 & echo > f"))
        print(sandbox.pid, flush=True)
    print(driver.zygote_pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def driver(tmp_path: Path, sandbox_images: ImageStore) -> AsyncIterator[NsDriver]:
    driver = NsDriver(tmp_path / "state", sandbox_images)
    await driver.start()
    yield driver
    pids = [sandbox.pid for sandbox in driver.live()] + [driver.zygote_pid]
    await driver.close()
    assert list((tmp_path / "state").iterdir()) == []
    assert [pid for pid in pids if start_ticks(pid)] == []
    assert str(tmp_path) not in _mounts()
    assert driver.cgroup_paths() == [] or not any(path.exists() for path in driver.cgroup_paths())


class TestNs(SandboxContract):
    """As root this runs sandboxes as a user of their own; otherwise everything is the caller's."""

    async def test_admission_refuses_one_too_many(
        self, tmp_path: Path, demo_spec: SandboxSpec, sandbox_images: ImageStore
    ) -> None:
        small = NsDriver(tmp_path / "small", sandbox_images, NsConfig(max_sandboxes=2))
        await small.start()
        for _ in range(2):
            await small.create(demo_spec)
        with pytest.raises(SandboxAdmissionError, match="2 sandboxes live"):
            await small.create(demo_spec)
        await small.close()
        full = NsDriver(tmp_path / "full", sandbox_images, NsConfig(min_free_disk_bytes=1 << 60))
        await full.start()
        with pytest.raises(SandboxAdmissionError, match="bytes free"):
            await full.create(demo_spec)
        await full.close()

    async def test_file_descriptors_do_not_leak(self, driver: NsDriver, demo_spec: SandboxSpec) -> None:
        before = _open_files()
        for _ in range(5):
            sandbox = await driver.create(demo_spec)
            await sh(sandbox, "sleep 300 & echo x")
            fork = await sandbox.fork()
            await fork.destroy()
            await sandbox.destroy()
        assert _open_files() == before

    async def test_death_of_an_init_is_an_infrastructure_error(self, driver: NsDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(demo_spec)
        call = asyncio.ensure_future(sh(sandbox, "sleep 300"))
        await asyncio.sleep(0.2)
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxInfraError):
            await call
        assert await eventually(lambda: _none_live(driver), "none live")

    async def test_death_of_the_zygote_ends_every_sandbox(self, driver: NsDriver, demo_spec: SandboxSpec) -> None:
        """The kernel kills the inits by itself: their parent's death is their own. The driver's owner is told, because
        a driver that can make no more sandboxes would fail every session from then on."""
        lost = asyncio.ensure_future(driver.lost())
        sandbox = await driver.create(demo_spec)
        pid = sandbox.pid
        call = asyncio.ensure_future(sh(sandbox, "sleep 300"))
        await asyncio.sleep(0.2)
        assert not lost.done()
        os.kill(driver.zygote_pid, signal.SIGKILL)
        with pytest.raises(SandboxInfraError):
            await call
        async with asyncio.timeout(30):
            await lost
        assert await eventually(lambda: _is_dead(pid), "is dead")
        with pytest.raises(SandboxError):
            await driver.create(demo_spec)

    async def test_killed_client_leaves_no_process_and_no_file(
        self, tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
    ) -> None:
        client, pids = _start_client(tmp_path / "client", sandbox_images, demo_spec)
        (instance,) = (path.name for path in (tmp_path / "client").iterdir() if path.is_dir())
        limited = os.geteuid() == 0 and bool(_cgroups_of(""))
        assert bool(_cgroups_of(instance)) is limited  # as was its group, where this host has groups
        assert all(start_ticks(pid) for pid in pids)  # they were there
        client.kill()
        client.wait()
        for pid in pids:
            assert await eventually(lambda pid=pid: _is_dead(pid), "is dead")  # type: ignore[misc]
        assert await eventually(lambda: _is_empty(tmp_path / "client"), "is empty")
        assert _cgroups_of(instance) == []
        client.stdout.close()  # type: ignore[union-attr]

    async def test_client_and_zygote_killed_together_are_cleaned_up_by_the_next_start(
        self, tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
    ) -> None:
        state = tmp_path / "both"
        client, pids = _start_client(state, sandbox_images, demo_spec)
        os.kill(pids[-1], signal.SIGSTOP)  # the zygote can't clean up
        client.kill()
        client.wait()
        os.kill(pids[-1], signal.SIGKILL)
        for pid in pids:
            assert await eventually(lambda pid=pid: _is_dead(pid), "is dead")  # type: ignore[misc]
        assert list(state.iterdir()) != []  # there was something to reap
        following = NsDriver(state, sandbox_images)
        await following.start()
        assert (await following.metrics()).reaped_at_start == 3
        await following.close()
        assert list(state.iterdir()) == []
        client.stdout.close()  # type: ignore[union-attr]

    async def test_state_of_a_live_driver_is_not_reaped(
        self, driver: NsDriver, tmp_path: Path, sandbox_images: ImageStore, demo_spec: SandboxSpec
    ) -> None:
        sandbox = await driver.create(demo_spec)
        second = NsDriver(tmp_path / "state", sandbox_images)
        await second.start()
        assert (await second.metrics()).reaped_at_start == 0
        await second.close()
        assert (await sh(sandbox, "echo alive")).stdout == "alive\n"

    async def test_workspace_can_be_neither_moved_nor_removed(self, driver: NsDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(demo_spec)
        await sh(sandbox, "mv /workspace /elsewhere; rm -rf /workspace; mkdir -p /workspace; echo x > /workspace/x")
        assert await sandbox.download() == {"x": b"x\n"}

    async def test_sandbox_runs_as_nobody_of_the_host(self, driver: NsDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(demo_spec)
        assert _owner(sandbox.pid) == (os.geteuid() or SANDBOX_UID)
        result = await sandbox.exec(ExecRequest(shell="id -u; echo x > /proc/sys/kernel/core_pattern; ls /proc/1/root"))
        assert result.stdout == "1000\n"


def _start_client(state: Path, images: ImageStore, spec: SandboxSpec) -> tuple["subprocess.Popen[str]", list[int]]:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(state), str(images.root), spec.image], stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    return client, [int(client.stdout.readline()) for _ in range(4)]


def _mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _cgroups_of(instance: str) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").rglob(f"odradek/{instance}") if path.is_dir()]


async def _is_empty(directory: Path) -> bool:
    return os.listdir(directory) == []  # noqa: PTH208


async def _none_live(driver: NsDriver) -> bool:
    return (await driver.metrics()).live == 0


async def _is_dead(pid: int) -> bool:
    return start_ticks(pid) == 0
