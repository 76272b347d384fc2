"""The sandbox contract on files: from the host's side, as deltas, and in forks and snapshots."""

import asyncio
import contextlib

import pytest
from contract.sandbox_world import OnOneSandbox, exists, sh, tree
from support.waiting import eventually

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.actors.environment.errors import SandboxError, SandboxNotFoundError, SandboxPathError, SandboxSpecError
from odradek.actors.environment.protocol import Sandbox, SandboxDriver, SandboxSpec


class FilesContract(OnOneSandbox):
    """What holds for a workspace and its copies."""

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
        assert await eventually(lambda: exists(sandbox, "early"), "exists")
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
