"""Sandbox create, exec and fork against bubblewrap, in the same run on the same machine.

    .venv/bin/python tests/bench/bench_sandbox.py [--rounds 100] [--bwrap PATH]

bubblewrap has no lasting sandbox: each command builds one, and a fork is a copy of the tree. So the pairs are
- create: ours to a ready sandbox; bubblewrap to the end of `true` in a new one;
- exec: `true` in a living sandbox; bubblewrap the same as before, since it has no other way;
- python: `python3 -S -B -c pass`, likewise;
- fork: of a workspace with 200 changed files; bubblewrap with a copy of them.
Rounds alternate, so that a busy machine disturbs both. Without bubblewrap only our side is measured. One line each:
p50 and p95 in milliseconds, and bubblewrap's over ours.
"""

import argparse
import asyncio
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, Sandbox, SandboxSpec
from odradek.sandbox_images.builder import build
from odradek.sandbox_images.recipe import load_recipe
from odradek.sandbox_images.store import ImageStore

RECIPE = Path(__file__).parents[2] / "sandbox_images/recipes/demo.toml"
CHANGED_FILES = 200
SETTLE_S = 0.02
"""Seconds before each measurement, for what the one before left to do (process exits, name spaces)."""
TRUE = ("true",)
PYTHON = ("python3", "-S", "-B", "-c", "pass")

Times = dict[str, list[float]]


async def timed(times: Times, name: str, work: Callable[[], Awaitable[object]]) -> None:
    await asyncio.sleep(SETTLE_S)
    start = time.perf_counter()
    await work()
    times.setdefault(name, []).append((time.perf_counter() - start) * 1000)


async def bwrap(program: str, root: Path, workspace: Path, command: tuple[str, ...]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"),
        *("--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--bind", str(workspace), "/workspace", "--chdir", "/workspace", "--", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 0, stderr


async def ours(driver: NsDriver, spec: SandboxSpec, living: Sandbox, times: Times) -> None:
    made: list[Sandbox] = []

    async def create() -> None:
        made.append(await driver.create(spec))

    async def fork() -> None:
        made.append(await living.fork())

    await timed(times, "create", create)
    await timed(times, "exec", lambda: living.exec(ExecRequest(argv=TRUE)))
    await timed(times, "python", lambda: living.exec(ExecRequest(argv=PYTHON)))
    await timed(times, "fork", fork)
    await living.write("changed/0", os.urandom(8))
    for sandbox in made:
        await sandbox.destroy()


async def theirs(program: str, root: Path, tree: Path, scratch: Path, times: Times) -> None:
    copy = scratch / "copy"

    async def copy_and_start() -> None:
        await asyncio.to_thread(shutil.copytree, tree, copy)
        await bwrap(program, root, copy, TRUE)

    await timed(times, "create", lambda: bwrap(program, root, tree, TRUE))
    await timed(times, "exec", lambda: bwrap(program, root, tree, TRUE))
    await timed(times, "python", lambda: bwrap(program, root, tree, PYTHON))
    await timed(times, "fork", copy_and_start)
    shutil.rmtree(copy)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def main(rounds: int, program: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-sandbox-") as name:
        scratch = Path(name)
        images = ImageStore(scratch / "images")
        spec = SandboxSpec(build(load_recipe(RECIPE), images), (images.layer_from_files({"readme.md": b"hello\n"}),))
        root = images.layer_path(images.image(spec.image).layers[0])
        tree = scratch / "tree"
        (tree / "changed").mkdir(parents=True)
        changed = {f"changed/{number}": b"x" * 2000 for number in range(CHANGED_FILES)}
        for path, content in changed.items():
            (tree / path).write_bytes(content)
        driver = NsDriver(scratch / "state", images)
        await driver.start()
        living = await driver.create(spec)
        await living.upload(changed)
        mine, other = Times(), Times()
        for _ in range(rounds):
            await ours(driver, spec, living, mine)
            if program is not None:
                await theirs(program, root, tree, scratch, other)
        await driver.close()
    report(mine, other, rounds)


def report(mine: Times, other: Times, rounds: int) -> None:
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, Linux {platform.release()}, {rounds} rounds")
    for name, values in mine.items():
        line = f"{name:8} ns p50 {quantile(values, 0.5):7.2f} ms  p95 {quantile(values, 0.95):7.2f} ms"
        if name in other:
            p50, p95 = quantile(other[name], 0.5), quantile(other[name], 0.95)
            line += f"   bwrap p50 {p50:7.2f} ms  p95 {p95:7.2f} ms   ratio {p50 / quantile(values, 0.5):5.2f}"
        print(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--bwrap", default=shutil.which("bwrap"), help="path of bubblewrap; found on PATH if present")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.rounds, arguments.bwrap))
