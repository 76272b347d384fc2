"""The contract of a sandbox driver. Every driver runs all of it; a subclass adds its own regressions.

A subclass is a test class with a `driver` fixture (a started driver over `sandbox_images`). Nothing here knows how a
driver works; nothing asserts a time, except that what must return at once is given far less than what it must not wait
for.
"""

import asyncio
import contextlib

import pytest
from support.waiting import eventually

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.actors.environment.errors import (
    SandboxError,
    SandboxGoneError,
    SandboxNotFoundError,
    SandboxPathError,
    SandboxSpecError,
)
from odradek.actors.environment.protocol import (
    ExecRequest,
    ExecResult,
    Limit,
    Limits,
    OutputChunk,
    Sandbox,
    SandboxDriver,
    SandboxSpec,
)
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


class SandboxContract:
    """Tests by the sentences of `protocol.py` and DESIGN section 6."""

    @pytest.fixture
    async def sandbox(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> Sandbox:
        return await driver.create(demo_spec)

    # --- a command's failure, time-out or kill is a result --------------------------------------------------------

    async def test_exit_code_and_both_streams(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, "echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr, result.signal) == (3, "out\n", "err\n", 0)

    async def test_death_by_signal_is_reported_as_a_shell_does(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(argv=("sh", "-c", "kill -TERM $$")))
        assert (result.exit_code, result.signal) == (143, 15)

    async def test_a_missing_program_is_a_result(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(argv=("no-such-program",)))
        assert result.exit_code == 127
        assert "no-such-program" in result.stderr

    async def test_merged_output_keeps_the_order_written(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(shell="echo 1; echo 2 >&2; echo 3", merge_output=True))
        assert result.stdout == "1\n2\n3\n"

    async def test_working_directory_and_environment(self, sandbox: Sandbox) -> None:
        request = ExecRequest(shell="pwd; echo $COLOUR", cwd="src/deep", env={"COLOUR": "blue"})
        assert (await sandbox.exec(request)).stdout == "/workspace/src/deep\nblue\n"

    async def test_environment_starts_empty(self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ODRADEK_TEST_SECRET", "not-for-agents")
        names = {line.partition("=")[0] for line in (await sh(sandbox, "env")).stdout.splitlines()}
        assert names <= {"PATH", "HOME", "LANG", "PWD", "PYTHONDONTWRITEBYTECODE", "_", "SHLVL", "OLDPWD"}

    async def test_malformed_commands_are_refused(self, sandbox: Sandbox) -> None:
        for request in (
            ExecRequest(),
            ExecRequest(argv=("a",), shell="b"),
            ExecRequest(shell="x\0y"),
            ExecRequest(shell="pwd", cwd="/etc"),
            ExecRequest(shell="true", timeout_s=0),
            ExecRequest(shell="#" * 400_000),
        ):
            with pytest.raises(SandboxSpecError):
                await sandbox.exec(request)

    # --- time-outs, background children, stdin, output: the rows 'environment' of cases/reports.md ----------------

    async def test_time_out_kills_the_whole_tree(self, sandbox: Sandbox) -> None:
        """mini-swe-agent 826: on time-out only the shell died. The child detaches in every way it can."""
        script = "(setsid sh -c 'while true; do echo x >> count; sleep 0.05; done' & ) ; echo began; sleep 300"
        result = await sh(sandbox, script, timeout_s=2)
        assert result.timed_out
        assert result.stdout == "began\n"
        assert (await sandbox.metrics()).processes == 0
        size = (await sandbox.stat("count")).size
        assert size > 0
        await asyncio.sleep(0.5)
        assert (await sandbox.stat("count")).size == size

    async def test_time_out_ends_a_fork_bomb(self, driver: SandboxDriver, demo_spec: SandboxSpec) -> None:
        spec = SandboxSpec(demo_spec.image, demo_spec.layers, limits=Limits(pids=Limit(60)))
        sandbox = await driver.create(spec)
        result = await sh(sandbox, "b() { b | b & }; b; sleep 300", timeout_s=2)
        assert result.timed_out
        assert await eventually(lambda: _no_process(sandbox), "no process")
        assert (await sh(sandbox, "echo alive")).stdout == "alive\n"

    async def test_stdin_is_empty(self, sandbox: Sandbox) -> None:
        """evalscope 1718: a command that reads stdin waited for the harness's."""
        for line in ("cat", "python3 -S", "read x"):
            result = await sh(sandbox, line, timeout_s=NEVER_S)
            assert not result.timed_out
        assert (await sh(sandbox, "printf hi | cat")).stdout == "hi"

    async def test_background_child_does_not_hold_the_call(self, sandbox: Sandbox, driver: SandboxDriver) -> None:
        """pim-agent 7: a child that keeps the pipe open kept the call open."""
        async with asyncio.timeout(NEVER_S / 2):
            result = await sh(sandbox, f"sleep {NEVER_S} & echo up", timeout_s=NEVER_S * 2)
        assert (result.stdout, result.exit_code) == ("up\n", 0)
        assert (await sandbox.metrics()).processes == 1
        await sandbox.destroy()
        assert sandbox.sandbox_id not in {info.sandbox_id for info in await driver.list()}

    async def test_background_child_can_go_on_writing(self, sandbox: Sandbox) -> None:
        loop = "i=0; while [ $i -lt 9000 ]; do echo some output to nobody; i=$((i+1)); done"
        script = f"(while [ ! -e go ]; do sleep 0.02; done; {loop}; touch done) & echo up"
        assert (await sh(sandbox, script)).stdout == "up\n"
        await sandbox.write("go", b"")
        assert await eventually(lambda: _exists(sandbox, "done"), "exists")

    async def test_output_just_before_the_end_is_complete(self, sandbox: Sandbox) -> None:
        for _ in range(10):
            result = await sandbox.exec(ExecRequest(shell="seq 1 9000", max_output_bytes=1 << 20))
            assert result.stdout.splitlines()[-1] == "9000"

    async def test_characters_split_over_reads_stay_whole(self, sandbox: Sandbox) -> None:
        """E2B 505: a multi-byte character split over two reads raised or was garbled."""
        script = (
            "import os\n"
            "data = 'ø→漢'.encode() * 40000\n"
            "step = 997\n"
            "for fd in (1, 2):\n"
            "    for i in range(0, len(data), step):\n"
            "        os.write(fd, data[i:i + step])\n"
        )
        request = ExecRequest(argv=("python3", "-S", "-c", script), max_output_bytes=1 << 20)
        streamed = {"stdout": "", "stderr": ""}
        result = None
        async for item in sandbox.exec_stream(request):
            if isinstance(item, OutputChunk):
                streamed[item.stream] += item.text
            else:
                result = item
        assert result is not None
        assert result.stdout == result.stderr == "ø→漢" * 40000
        assert streamed == {"stdout": result.stdout, "stderr": result.stderr}

    async def test_invalid_bytes_are_shown_as_such(self, sandbox: Sandbox) -> None:
        result = await sh(sandbox, r"printf 'a\377b\303'")
        assert result.stdout == "a\\xffb\\xc3"

    async def test_long_output_is_cut_in_the_middle_and_flagged(self, sandbox: Sandbox) -> None:
        result = await sandbox.exec(ExecRequest(shell="echo first; seq 1 200000; echo last", max_output_bytes=4096))
        assert result.truncated
        assert result.stdout.startswith("first\n")
        assert result.stdout.endswith("last\n")
        assert "bytes omitted" in result.stdout
        assert len(result.stdout) < 4096 + 100

    async def test_cancelling_a_call_kills_its_command(self, sandbox: Sandbox) -> None:
        call = asyncio.ensure_future(sh(sandbox, "touch began; sleep 300"))
        assert await eventually(lambda: _exists(sandbox, "began"), "exists")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await eventually(lambda: _no_process(sandbox), "no process")

    async def test_same_key_runs_once(self, sandbox: Sandbox) -> None:
        request = ExecRequest(shell="echo x >> ran; wc -l < ran", key="call-1")
        first, second = await asyncio.gather(sandbox.exec(request), sandbox.exec(request))
        third = await sandbox.exec(request)
        assert first == second == third
        assert await sandbox.read("ran") == b"x\n"

    async def test_take_over_kills_older_calls_and_refuses_later_ones(self, sandbox: Sandbox) -> None:
        old = asyncio.ensure_future(sandbox.exec(ExecRequest(shell="touch began; sleep 300", epoch=1)))
        assert await eventually(lambda: _exists(sandbox, "began"), "exists")
        await sandbox.take_over(2)
        assert (await old).signal == 9
        with pytest.raises(SandboxSpecError, match="epoch"):
            await sandbox.exec(ExecRequest(shell="true", epoch=1))
        assert (await sandbox.exec(ExecRequest(shell="true", epoch=2))).exit_code == 0

    # --- jobs -----------------------------------------------------------------------------------------------------

    async def test_job_is_polled_and_stopped_by_its_id(self, sandbox: Sandbox) -> None:
        job = await sandbox.start_job(ExecRequest(shell="echo one; touch began; sleep 300 & wait", timeout_s=NEVER_S))
        assert await eventually(lambda: _exists(sandbox, "began"), "exists")
        status = await sandbox.poll_job(job)
        assert (status.running, status.output) == (True, "one\n")
        assert (await sandbox.poll_job(job)).output == ""
        stopped = await sandbox.stop_job(job)
        assert (stopped.running, stopped.signal) == (False, 9)
        assert await eventually(lambda: _no_process(sandbox), "no process")
        with pytest.raises(SandboxNotFoundError):
            await sandbox.poll_job("job-none")

    # --- files from the host side ---------------------------------------------------------------------------------

    async def test_read_write_stat_list(self, sandbox: Sandbox) -> None:
        assert await sandbox.read("readme.md") == b"hello\n"
        assert await sandbox.read("/workspace/readme.md", offset=1, limit=3) == b"ell"
        written = await sandbox.write("new/dir/file.bin", b"\x00\xff")
        assert (written.path, written.size, written.mode) == ("new/dir/file.bin", 2, 0o644)
        assert [entry.path for entry in await sandbox.list("src")] == ["src/deep", "src/main.py"]
        assert (await sandbox.stat("link", follow=False)).target == "readme.md"
        result = await sh(sandbox, "wc -c < new/dir/file.bin; echo more >> new/dir/file.bin; rm -r new/dir; ls new")
        assert (result.stdout.strip(), result.exit_code) == ("2", 0)

    async def test_write_keeps_the_mode_and_is_seen_at_once(self, sandbox: Sandbox) -> None:
        await sandbox.write("run.sh", b"#!/bin/sh\necho other\n")
        assert (await sh(sandbox, "./run.sh")).stdout == "other\n"

    async def test_paths_never_leave_the_workspace(self, sandbox: Sandbox) -> None:
        """OpenBot 73: a write through a link at the last path part left the workspace."""
        await sh(
            sandbox,
            "echo secret > /home/agent/outside; ln -s /home/agent/outside notes.md; ln -s /home/agent/absent dangling;"
            "ln -s ../../etc up; ln -s /workspace/src abs; ln -s missing inner; ln -s loop loop; ln -s / root",
        )
        for path in ("notes.md", "dangling", "up/passwd", "../etc/passwd", "/etc/passwd", "root/etc/passwd", "loop"):
            with pytest.raises(SandboxPathError):
                await sandbox.read(path)
            with pytest.raises(SandboxPathError):
                await sandbox.write(path, b"changed")
        with pytest.raises(SandboxPathError):
            await sandbox.write("inner", b"through a dangling link")
        outside = await sh(sandbox, "cat /home/agent/outside; ls /home/agent /workspace/missing")
        assert outside.stdout == "secret\n/home/agent:\noutside\n"

    async def test_links_inside_the_workspace_work(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "ln -s /workspace/src abs; ln -s ../workspace/src/main.py round")
        assert await sandbox.read("abs/main.py") == b"print('main')\n"
        assert await sandbox.read("round") == b"print('main')\n"
        assert (await sandbox.write("link", b"changed\n")).path == "readme.md"
        assert await sandbox.read("readme.md") == b"changed\n"
        assert (await sandbox.stat("link", follow=False)).kind == "symlink"
        assert (await sandbox.write("abs/new/file", b"n")).path == "src/new/file"

    async def test_special_files_never_block_a_read(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "python3 -S -c \"import os; os.mkfifo('fifo')\"")
        with pytest.raises(SandboxPathError, match="not a regular file"):
            await sandbox.read("fifo")
        with pytest.raises(SandboxPathError, match="directory"):
            await sandbox.read("src")
        with pytest.raises(SandboxPathError, match="does not exist"):
            await sandbox.read("absent")
        assert any("fifo" in name for name in (await sandbox.diff()).skipped)

    async def test_upload_and_download(self, sandbox: Sandbox) -> None:
        await sandbox.upload({"up/a": b"1", "up/b/c": b"2"})
        assert await sandbox.download("up") == {"up/a": b"1", "up/b/c": b"2"}
        assert await sandbox.download("up/a") == {"up/a": b"1"}

    # --- the delta ------------------------------------------------------------------------------------------------

    async def test_delta_rebuilds_the_tree_in_a_fresh_sandbox(
        self, sandbox: Sandbox, driver: SandboxDriver, demo_spec: SandboxSpec
    ) -> None:
        await sh(
            sandbox,
            "rm readme.md; echo changed >> src/main.py; rm -r src/deep; mkdir -p src/deep/other empty; chmod 700 empty;"
            "echo new > src/deep/other/file; chmod 400 src/deep/other/file; ln -sf nowhere link; chmod 644 run.sh;"
            "mkdir shut; echo in > shut/file; chmod 000 shut/file; chmod 000 shut; printf 'a\\0b' > 'odd name\t'",
        )
        delta = await sandbox.diff()
        assert not delta.skipped
        other = await driver.create(demo_spec)
        await other.apply(delta)
        for each in (sandbox, other):
            await sh(each, "chmod 700 shut; chmod 600 shut/file")
        assert await tree(other) == await tree(sandbox)
        assert (await other.stat("src/deep/other/file")).mode == 0o400

    async def test_recreated_directory_loses_its_old_content(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "rm -r src; mkdir src; echo other > src/other.py")
        changes = {(entry.path, entry.kind) for entry in (await sandbox.diff()).entries}
        assert changes == {("src/deep", "delete"), ("src/main.py", "delete"), ("src/other.py", "file")}

    async def test_untouched_content_is_no_change(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "touch readme.md; cp src/main.py m; cat m > src/main.py; rm m; rm link; ln -s readme.md link")
        assert (await sandbox.diff()).entries == ()

    async def test_incremental_deltas_compose_to_the_whole(
        self, sandbox: Sandbox, driver: SandboxDriver, demo_spec: SandboxSpec
    ) -> None:
        other = await driver.create(demo_spec)
        for line in (
            "echo 1 > a; rm readme.md",
            "rm a; mkdir a; echo 2 > a/b; echo back > readme.md",
            "true",
            "rm -r a src; echo hello > readme.md; ln -s readme.md src",
            "rm src; mkdir src; echo print > src/new.py",
        ):
            await sh(sandbox, line)
            delta = await sandbox.diff(incremental=True)
            assert bool(delta.entries) is (line != "true")
            await other.apply(delta)
            assert await tree(other) == await tree(sandbox)
            assert (await other.diff(incremental=True)).entries == ()
        assert (await other.diff()).entries == (await sandbox.diff()).entries

    async def test_apply_fetches_by_digest_and_refuses_what_leaves(self, sandbox: Sandbox) -> None:
        async def fetch(digest: str) -> bytes:
            return f"content of {digest}".encode()

        await sandbox.apply(Delta((DeltaEntry("f", "file", 0o600, digest="d1"),)), fetch)
        assert await sandbox.read("f") == b"content of d1"
        with pytest.raises(SandboxSpecError):
            await sandbox.apply(Delta((DeltaEntry("f", "file", 0o600, digest="d1"),)))
        for path in ("../x", "/x", "a//b", "a/../../x", "."):
            with pytest.raises(SandboxSpecError):
                await sandbox.apply(Delta((DeltaEntry(path, "dir", 0o755),)))

    async def test_apply_does_not_follow_links(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "ln -s /home/agent way")
        with pytest.raises(SandboxError):
            await sandbox.apply(Delta((DeltaEntry("way/f", "file", 0o600, content=b"x"),)))
        assert (await sh(sandbox, "ls /home/agent")).stdout == ""

    # --- forks ----------------------------------------------------------------------------------------------------

    async def test_fork_has_the_files_and_goes_its_own_way(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "echo before > state; rm readme.md; echo cache > /home/agent/cache")
        fork = await sandbox.fork()
        assert await tree(fork) == await tree(sandbox)
        assert (await sh(fork, "cat /home/agent/cache")).stdout == "cache\n"
        await sh(fork, "echo fork > state; echo mine > mine")
        await sh(sandbox, "echo source >> state")
        assert await sandbox.read("state") == b"before\nsource\n"
        assert await fork.read("state") == b"fork\n"
        assert {entry.path for entry in (await fork.diff(incremental=True)).entries} == {"mine", "state"}
        assert {entry.path for entry in (await fork.diff()).entries} == {"mine", "readme.md", "state"}

    async def test_fork_of_a_sandbox_that_is_at_work(self, sandbox: Sandbox) -> None:
        call = asyncio.ensure_future(
            sh(sandbox, "echo early > early; while [ ! -e go ]; do sleep 0.02; done; echo late")
        )
        assert await eventually(lambda: _exists(sandbox, "early"), "exists")
        fork = await sandbox.fork()
        assert await fork.read("early") == b"early\n"
        assert (await fork.metrics()).processes == 0
        await sandbox.write("go", b"")
        assert (await call).stdout == "late\n"
        with pytest.raises(SandboxPathError):
            await fork.stat("go")

    async def test_forks_of_forks_to_any_depth(self, sandbox: Sandbox) -> None:
        current = sandbox
        await sh(current, "mkdir d; touch d/keep")
        for depth in range(70):  # past the length at which a stack is flattened
            await current.write(f"d/{depth}", str(depth).encode())
            if depth % 10 == 5:
                await sh(current, f"rm d/{depth}; rm -rf e; mkdir e; echo {depth} > e/only")
            following = await current.fork()
            await current.destroy()
            current = following
        kept = {str(depth) for depth in range(70) if depth % 10 != 5} | {"keep"}
        assert {entry.path for entry in await current.list("d")} == {f"d/{name}" for name in kept}
        assert await current.download("e") == {"e/only": b"65\n"}
        assert len((await current.diff()).entries) == len(kept) + 3

    async def test_destroy_during_a_fork_ends_both_ways(self, sandbox: Sandbox, driver: SandboxDriver) -> None:
        for delay in range(6):
            source = await sandbox.fork()
            fork = asyncio.ensure_future(source.fork())
            await asyncio.sleep(delay / 300)
            await source.destroy()
            with contextlib.suppress(SandboxError):  # it was destroyed first, and says so
                await (await fork).destroy()
        assert {info.sandbox_id for info in await driver.list()} == {sandbox.sandbox_id}
        assert (await sh(sandbox, "cat readme.md")).stdout == "hello\n"

    async def test_snapshot_outlives_its_sandbox(self, sandbox: Sandbox, driver: SandboxDriver) -> None:
        await sandbox.write("kept", b"1")
        snapshot = await sandbox.snapshot()
        await sandbox.destroy()
        again = await driver.create_from(snapshot)
        assert await again.read("kept") == b"1"
        await driver.drop_snapshot(snapshot)
        assert (await sh(again, "cat kept")).stdout == "1"
        with pytest.raises(SandboxNotFoundError):
            await driver.create_from(snapshot)

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
        assert await eventually(lambda: _no_process(sandbox), "no process")

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
        assert await eventually(lambda: _exists(sandbox, "count"), "exists")
        await sandbox.pause()
        size = (await sandbox.stat("count")).size
        await asyncio.sleep(0.3)
        assert (await sandbox.stat("count")).size == size
        with pytest.raises(SandboxSpecError, match="paused"):
            await sh(sandbox, "true")
        await sandbox.resume()
        assert await eventually(lambda: _larger(sandbox, "count", size), "larger")

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


async def _no_process(sandbox: Sandbox) -> bool:
    return (await sandbox.metrics()).processes == 0


async def _exists(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.stat(path)
    except SandboxPathError:
        return False
    return True


async def _larger(sandbox: Sandbox, path: str, size: int) -> bool:
    return (await sandbox.stat(path)).size > size
