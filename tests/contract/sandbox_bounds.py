"""The sandbox contract on what encloses a sandbox: isolation, limits, lifetime, and the driver's own calls."""

import asyncio

import pytest
from contract.sandbox_world import NEVER_S, OnOneSandbox, exists, larger, no_process, sh
from support.waiting import eventually

from odradek.actors.environment.errors import SandboxError, SandboxGoneError, SandboxNotFoundError, SandboxSpecError
from odradek.actors.environment.protocol import ExecRequest, Limit, Limits, Sandbox, SandboxDriver, SandboxSpec


class BoundsContract(OnOneSandbox):
    """What a sandbox can't do, and what its driver keeps to."""

    # --- isolation ------------------------------------------------------------------------------------------------

    async def test_no_network_but_loopback(self, sandbox: Sandbox) -> None:
        script = (
            "import socket\n"
            "server = socket.create_server(('127.0.0.1', 0))\n"
            "socket.create_connection(server.getsockname(), 5).close()\n"
            "print('loopback')\n"
            "for family, address in ((socket.AF_INET, ('192.0.2.1', 80)), (40, (2, 22))):\n"
            "    try:\n"
            "        socket.socket(family, socket.SOCK_STREAM).connect(address)\n"
            "        print('reached', address)\n"
            "    except OSError as error:\n"
            "        print('refused')\n"
        )
        result = await sandbox.exec(ExecRequest(argv=("python3", "-S", "-c", script)))
        assert result.stdout.split() == ["loopback", "refused", "refused"]

    async def test_no_way_to_new_privileges(self, sandbox: Sandbox) -> None:
        script = (
            "import ctypes\n"
            "c = ctypes.CDLL(None, use_errno=True)\n"
            "def call(name, result):\n"
            "    print(name, 'refused' if result < 0 else 'done')\n"
            "call('mount', c.mount(b't', b'/tmp', b'tmpfs', 0, None))\n"
            "call('unshare', c.unshare(0x10000000))\n"
            "call('ptrace', c.ptrace(16, 1, 0, 0))\n"
            "call('chroot', c.chroot(b'/tmp'))\n"
            "call('sethostname', c.sethostname(b'x', 1))\n"
            "call('setuid', c.setuid(0))\n"
            "call('clone', c.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))\n"
            "try:\n"
            "    open('/proc/1/mem', 'rb')\n"
            "    print('mem done')\n"
            "except OSError:\n"
            "    print('mem refused')\n"
        )
        result = await sandbox.exec(ExecRequest(argv=("python3", "-S", "-c", script)))
        lines = result.stdout.splitlines()
        assert len(lines) == 8, result
        assert [line for line in lines if not line.endswith("refused")] == []
        status = (await sh(sandbox, "cat /proc/self/status")).stdout
        assert "CapBnd:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status

    async def test_killing_everything_inside_leaves_the_sandbox_usable(self, sandbox: Sandbox) -> None:
        await sh(sandbox, f"sleep {NEVER_S} &")
        await sh(sandbox, "kill -9 1; kill -9 -1", timeout_s=30)
        assert (await sh(sandbox, "echo alive")).stdout == "alive\n"
        assert await eventually(lambda: no_process(sandbox), "no process")

    async def test_sandboxes_do_not_see_each_other(
        self, sandbox: Sandbox, driver: SandboxDriver, demo_spec: SandboxSpec
    ) -> None:
        other = await driver.create(demo_spec)
        await sh(other, f"sleep {NEVER_S} & echo theirs > /workspace/x; echo theirs > /tmp/x")
        seen = await sh(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls /workspace /tmp")
        assert "sleep" not in seen.stdout
        assert "x" not in seen.stdout.split()

    # --- limits ---------------------------------------------------------------------------------------------------

    async def test_limits_hold(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        limits = Limits(cpus=Limit(1), memory_bytes=Limit(128 << 20), pids=Limit(32), disk_bytes=Limit(1 << 20))
        sandbox = await driver.create(SandboxSpec(demo_spec.image, limits=limits))
        memory = await sandbox.exec(ExecRequest(argv=("python3", "-S", "-c", "b'x' * (512 << 20)")))
        assert memory.exit_code != 0
        script = "import os\nfor _ in range(100):\n    if os.fork() == 0:\n        import time; time.sleep(300)\n"
        forks = await sandbox.exec(ExecRequest(argv=("python3", "-S", "-c", script), timeout_s=60))
        assert (forks.exit_code, forks.timed_out) == (1, False)
        assert "BlockingIOError" in forks.stderr
        disk = await sh(sandbox, "yes | head -c 3000000 > big")
        assert disk.exit_code != 0 or (await sandbox.stat("big")).size <= 1 << 20

    async def test_what_can_not_be_enforced_is_refused(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        capabilities = await driver.capabilities()
        for name, levels in capabilities.enforcement.items():
            if "cgroup" not in levels:
                limits = Limits(**{name: Limit(1 << 30, weakest="cgroup")})
                with pytest.raises(SandboxSpecError, match=name):
                    await driver.create(SandboxSpec(demo_spec.image, limits=limits))
        for bad in (
            SandboxSpec(image="0" * 64),
            SandboxSpec(demo_spec.image, layers=("f" * 64,)),
            SandboxSpec(demo_spec.image, lifetime_s=0),
            SandboxSpec(demo_spec.image, limits=Limits(pids=Limit(0))),
            SandboxSpec(demo_spec.image, env={"A=B": "c"}),
        ):
            with pytest.raises(SandboxSpecError):
                await driver.create(bad)
        sandbox = await driver.create(demo_spec)
        with pytest.raises(SandboxSpecError, match="network"):
            await sandbox.set_network("host")
        assert await driver.list() != ()

    # --- life -----------------------------------------------------------------------------------------------------

    async def test_same_key_makes_one_sandbox(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        first, second = await asyncio.gather(*(driver.create(demo_spec, key="k") for _ in range(2)))
        assert first is second
        await first.destroy()
        assert (await driver.create(demo_spec, key="k")).sandbox_id != first.sandbox_id

    async def test_lifetime_ends_a_sandbox_and_every_wait(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(SandboxSpec(demo_spec.image, lifetime_s=1.0))
        with pytest.raises(SandboxGoneError, match="lifetime"):
            await sh(sandbox, f"sleep {NEVER_S}", timeout_s=NEVER_S)
        with pytest.raises(SandboxError):
            await sandbox.read("readme.md")
        assert (await driver.metrics()).expired == 1

    async def test_renewed_lifetime_counts(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(SandboxSpec(demo_spec.image, lifetime_s=2.0))
        await sandbox.renew(NEVER_S)
        assert (await sh(sandbox, "sleep 2.5; echo still here")).stdout == "still here\n"

    async def test_pause_stops_and_resume_goes_on(self, sandbox: Sandbox) -> None:
        await sandbox.start_job(
            ExecRequest(shell="while true; do echo x >> count; sleep 0.01; done", timeout_s=NEVER_S)
        )
        assert await eventually(lambda: exists(sandbox, "count"), "exists")
        await sandbox.pause()
        size = (await sandbox.stat("count")).size
        await asyncio.sleep(0.3)
        assert (await sandbox.stat("count")).size == size
        with pytest.raises(SandboxSpecError, match="paused"):
            await sh(sandbox, "true")
        await sandbox.resume()
        assert await eventually(lambda: larger(sandbox, "count", size), "larger")

    async def test_destroy_twice_is_once(self, sandbox: Sandbox, driver: SandboxDriver) -> None:
        await asyncio.gather(sandbox.destroy(), sandbox.destroy())
        await sandbox.destroy()
        with pytest.raises(SandboxGoneError):
            await sh(sandbox, "true")
        with pytest.raises(SandboxNotFoundError):
            await driver.get(sandbox.sandbox_id)
        assert (await driver.metrics()).destroyed == 1

    async def test_labels_are_listed(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        sandbox = await driver.create(SandboxSpec(demo_spec.image, labels={"session": "s-1"}))
        listed = {info.sandbox_id: dict(info.labels) for info in await driver.list()}
        assert listed == {sandbox.sandbox_id: {"session": "s-1"}}
        assert await driver.get(sandbox.sandbox_id) is sandbox

    async def test_a_hundred_at_once(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        async def one(number: int) -> str:
            sandbox = await driver.create(demo_spec)
            await sandbox.write("n", str(number).encode())
            result = await sh(sandbox, "cat n", timeout_s=240)
            return result.stdout

        assert await asyncio.gather(*(one(number) for number in range(100))) == [str(n) for n in range(100)]
        assert (await driver.metrics()).live == 100

    async def test_preflight_is_all_green(self, driver: SandboxDriver) -> None:
        assert [check for check in await driver.preflight() if not check.ok] == []
        assert await driver.list() == ()
