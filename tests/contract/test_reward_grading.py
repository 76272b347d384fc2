"""Grading in a real sandbox: fresh image, starting files, set-up, the session's deltas, and nobody else.

Each test ends with no sandbox left. The pure half is in `tests/unit/test_reward_hidden.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from odradek.actors.environment.archive import pack
from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.logged import INLINE_BYTES, to_logged
from odradek.actors.environment.ns import NsDriver
from odradek.actors.environment.protocol import ExecRequest, Sandbox
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward import grader, hidden_tests
from odradek.actors.reward.efficiency import Conduct
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.grader import Grade, grade
from odradek.actors.session.ports import WorkspaceStart, start_of
from odradek.actors.tasks.refusal import refusal
from odradek.sandbox_images.store import ImageStore
from odradek.sandbox_images.tree import FileSpec
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.events.sessions import (
    FileChange,
    SessionCompleted,
    SessionFailed,
    Usage,
    WorkspaceDelta,
)
from odradek.streams.events.tasks import HiddenCase, HiddenScript, HiddenTests, TaskPublished

pytestmark = pytest.mark.contract

BUGGY = "def total(xs):\n    return max(xs)\n"
RIGHT = "def total(xs):\n    return sum(xs)\n"
TESTS = HiddenTests(
    module="shop",
    function="total",
    cases=[HiddenCase(id="sum of [2, 3]", args=[[2, 3]], want=5), HiddenCase(id="one item", args=[[4]], want=4)],
    fail_to_pass=["sum of [2, 3]"],
    pass_to_pass=["one item"],
)
TASK = TaskPublished(task_id="t", instruction="fix it", files={"shop.py": BUGGY, "lib/old.py": RIGHT}, tests=TESTS)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageStore:
    return ImageStore(tmp_path_factory.mktemp("images"))


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def factory(tmp_path: Path, images: ImageStore, store: MemoryStore) -> AsyncIterator[SandboxFactory]:
    driver = NsDriver(tmp_path / "sandboxes", images)
    await driver.start()
    yield SandboxFactory(driver, images, BlobStore(store))
    left = await driver.list()
    await driver.close()
    assert left == (), "a grading sandbox was left behind"


def wrote(path: str, text: str | bytes, mode: int = 0o644) -> FileChange:
    return FileChange(path=path, kind="file", mode=mode, content=text.encode() if isinstance(text, str) else text)


def made(path: str) -> FileChange:
    return FileChange(path=path, kind="dir", mode=0o755)


def session(*changes: FileChange, turns: int = 2, errors: int = 0) -> Conduct:
    """A session that ended by itself after these changes, one call each."""
    deltas = [WorkspaceDelta(changes=[change]) for change in changes]
    end = SessionCompleted(reason="done", first_offset=0, usage=Usage())
    return Conduct(end=end, turns=turns, errors=errors, deltas=deltas)


def ids(result: Grade) -> tuple[list[str], list[str]]:
    return result.passed, result.failed


ALL = ["sum of [2, 3]", "one item"]


# -- hidden tests ---------------------------------------------------------------------------------------------------


async def test_a_correct_fix_passes_all(factory: SandboxFactory) -> None:
    result = await grade(TASK, session(wrote("shop.py", RIGHT)), factory)
    assert ids(result) == (ALL, [])
    assert (result.components["solved"], result.notes) == (1.0, [])
    assert 0.9 < result.total < 1.0, "two turns cost a little"


async def test_an_untouched_workspace_is_not_solved(factory: SandboxFactory) -> None:
    result = await grade(TASK, session(), factory)
    assert ids(result) == (["one item"], ["sum of [2, 3]"])
    assert (result.components["solved"], result.total) == (0.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        [wrote("shop.py", "import os\nos._exit(0)\n")],
        [wrote("shop.py", "import sys\nsys.exit(0)\n")],
        [wrote("shop.py", "def total(xs)\n")],
        [wrote("json.py", "import os\nos._exit(0)\n")],
        [wrote("python3", "#!/bin/sh\necho grader-started\n", 0o755), wrote("sitecustomize.py", "1/0\n")],
        [FileChange(path="shop.py", kind="delete")],
        [FileChange(path="shop.py", kind="symlink", content=b"shop.py")],
        [FileChange(path="shop.py", kind="symlink", content=b"/etc/passwd")],
    ],
    ids=["_exit", "exit", "syntax", "planted json", "planted python", "deleted", "loop of links", "link outside"],
)
async def test_a_session_cannot_make_its_failure_pass_or_go_ungraded(
    factory: SandboxFactory, changes: list[FileChange]
) -> None:
    result = await grade(TASK, session(*changes), factory)
    assert "sum of [2, 3]" in result.failed and result.components["solved"] == 0.0


async def test_an_endless_loop_fails_and_is_graded(factory: SandboxFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grader, "GRADING_SECONDS", 8.0)
    loop = "import subprocess\nsubprocess.Popen(['sleep', '300'])\ndef total(xs):\n    while True: pass\n"
    result = await grade(TASK, session(wrote("shop.py", loop)), factory)
    assert ids(result) == ([], ALL)
    assert result.notes == ["timed out"]


def many(count: int, size: int) -> HiddenTests:
    """Cases whose arguments and answers are `size` characters each."""
    cases = [HiddenCase(id=f"case {n}", args=["é" * size], want="é" * size + "!") for n in range(count)]
    return HiddenTests(module="shop", function="total", cases=cases, fail_to_pass=[case.id for case in cases])


@pytest.mark.parametrize(("count", "size"), [(1, 60_000), (400, 1_000), (3, 900_000)])
async def test_hidden_cases_of_any_size_that_an_event_holds_are_graded(
    factory: SandboxFactory, count: int, size: int
) -> None:
    """More than one argument of a process takes, and answers beyond what is read back of other output."""
    tests = many(count, size)
    task = msgspec.structs.replace(TASK, tests=tests)
    assert refusal(task) is None and len(hidden_tests.plan_of(tests, "")) > 128 * 1024
    right = "def total(text):\n    print('x' * 1000)\n    return text + '!'\n"
    result = await grade(task, session(wrote("shop.py", right)), factory)
    assert ids(result) == ([case.id for case in tests.cases], []) and result.components["solved"] == 1.0
    wrong = await grade(task, session(wrote("shop.py", right.replace("!", "?"))), factory)
    assert ids(wrong) == ([], [case.id for case in tests.cases])


async def test_the_code_under_test_finds_no_plan(factory: SandboxFactory) -> None:
    spy = (
        "import os, sys\ndef total(xs):\n"
        "    return sum(xs) if not [n for n in os.listdir('.') if 'grading' in n] else -1\n"
    )
    result = await grade(TASK, session(wrote("shop.py", spy)), factory)
    assert ids(result) == (ALL, [])


async def test_a_workspace_by_reference_is_made_for_agent_and_grader_and_checked(
    factory: SandboxFactory, store: MemoryStore
) -> None:
    tar = pack({"shop.py": FileSpec(BUGGY.encode()), "data.bin": FileSpec(b"\xff\0"), "go": FileSpec(b"#!", 0o755)})
    ref = await BlobStore(store).put(tar)
    task = msgspec.structs.replace(TASK, files={}, files_ref=ref)
    assert refusal(task) is None
    sandbox = await factory.open(start_of(task), [], label="agent")
    try:
        assert await sandbox.read("data.bin") == b"\xff\0"
        assert (await sandbox.exec(ExecRequest(shell="test -x go && ! test -x shop.py"))).exit_code == 0
    finally:
        await sandbox.destroy()
    result = await grade(task, session(wrote("shop.py", RIGHT)), factory)
    assert ids(result) == (ALL, [])
    gone = msgspec.structs.replace(ref, sha256="0" * 64, key=f"blobs/shared/{'0' * 64}")
    await store.put(f"blobs/shared/{'1' * 64}", tar)
    other = msgspec.structs.replace(ref, sha256="1" * 64, key=f"blobs/shared/{'1' * 64}")
    for bad in (gone, other):
        with pytest.raises(GraderCouldNotRun, match="files_ref") as caught:
            await grade(msgspec.structs.replace(task, files_ref=bad), session(), factory)
        assert not caught.value.retryable, "another attempt would find the same object"


# -- the workspace that is graded -----------------------------------------------------------------------------------


async def test_deltas_are_applied_in_order_deletions_and_links_included(factory: SandboxFactory) -> None:
    changes = [
        wrote("shop.py", "raise SystemExit\n"),
        FileChange(path="shop.py", kind="delete"),
        made("shop"),
        made("shop/parts"),
        wrote("shop/parts/real.py", RIGHT),
        FileChange(path="shop/__init__.py", kind="symlink", content=b"parts/real.py"),
        FileChange(path="lib", kind="delete"),
    ]
    assert ids(await grade(TASK, session(*changes), factory)) == (ALL, [])
    needs_lib = wrote("shop.py", "from lib.old import total\n")
    assert ids(await grade(TASK, session(needs_lib), factory)) == (ALL, [])
    gone = await grade(TASK, session(needs_lib, FileChange(path="lib/old.py", kind="delete")), factory)
    assert gone.notes == ["import failed: ModuleNotFoundError"]


async def test_what_a_real_session_changed_is_what_is_graded(factory: SandboxFactory) -> None:
    """Guarantee 2: image + files + logged delta, by way of the agent's own sandbox, a large file by claim check."""
    start = WorkspaceStart(TASK.image, {path: text.encode() for path, text in TASK.files.items()})
    agent = await factory.open(start, [], label="agent")
    work = f"head -c {INLINE_BYTES + 5} /dev/zero | tr '\\0' 1 > table.txt; rm -r lib; ln -s shop.py alias.py"
    await agent.exec(ExecRequest(shell=work))
    source = "def total(xs):\n    return sum(xs) * (len(open('/workspace/table.txt').read()) == %d)\n"
    await agent.write("shop.py", (source % (INLINE_BYTES + 5)).encode())
    delta = await to_logged(await agent.diff(incremental=True), factory._blobs, "")
    await agent.destroy()
    assert {change.path: change.kind for change in delta.changes} == {
        "alias.py": "symlink", "lib": "delete", "shop.py": "file", "table.txt": "file",
    }  # fmt: skip
    assert [change.path for change in delta.changes if change.ref is not None] == ["table.txt"]
    conduct = session()
    conduct.deltas.append(delta)
    assert ids(await grade(TASK, conduct, factory)) == (ALL, [])


async def test_a_delta_whose_content_is_lost_is_ungraded_never_scored(
    factory: SandboxFactory, store: MemoryStore
) -> None:
    """Guarantee 11."""
    ref = await factory._blobs.put(b"x" * (INLINE_BYTES + 1))
    store._objects.clear()
    factory._blobs = BlobStore(store)
    with pytest.raises(GraderCouldNotRun, match="BlobMissing"):
        await grade(TASK, session(FileChange(path="big", kind="file", ref=ref)), factory)


async def test_a_session_that_we_failed_is_ungraded(factory: SandboxFactory) -> None:
    conduct = session()
    conduct.end = SessionFailed(cause="host lost", first_offset=0)
    with pytest.raises(GraderCouldNotRun, match="session failed: host lost"):
        await grade(TASK, conduct, factory)


# -- a verifier of the task's own -----------------------------------------------------------------------------------


def scripted(test_sh: str, *, seconds: float = 60.0, **files: str) -> TaskPublished:
    tree = {"test.sh": test_sh.encode()} | {f"{name}.py": text.encode() for name, text in files.items()}
    script = HiddenScript(files=tree, timeout_seconds=seconds)
    return TaskPublished(task_id="h", instruction="fix it", files={"shop.py": BUGGY}, script=script)


CHECK = "import sys; sys.path.insert(0, '/workspace')\nfrom shop import total\nassert total([2, 3]) == 5\n"
HONEST = "if python3 /tests/check.py; then r=1; else r=0; fi\necho $r > /logs/verifier/reward.txt\n"


async def test_a_verifier_s_reward_is_the_solved_component(factory: SandboxFactory) -> None:
    task = scripted(HONEST, check=CHECK)
    assert (await grade(task, session(), factory)).components["solved"] == 0.0
    assert (await grade(task, session(wrote("shop.py", RIGHT)), factory)).components["solved"] == 1.0
    part = await grade(scripted("echo '{\"reward\": 0.5}' > /logs/verifier/reward.json"), session(), factory)
    assert part.components["solved"] == 0.5


async def test_case_dawn_14_a_planted_reward_file_is_noted_and_ignored(factory: SandboxFactory) -> None:
    """valbaudo/dawn #14; verifiers PR 2152: the agent writes reward.json = 1 and leaves a loop that rewrites it, while
    its session's grading writes 0."""
    task = scripted(HONEST, check=CHECK)
    start = WorkspaceStart(task.image, {path: text.encode() for path, text in task.files.items()})
    agent = await factory.open(start, [], label="agent")
    loop = "mkdir -p /logs/verifier; while :; do for d in . /logs/verifier; do echo 1 > $d/reward.json; done; done"
    job = await agent.start_job(ExecRequest(shell=loop))
    await agent.exec(ExecRequest(shell="until test -s reward.json; do sleep 0.05; done", timeout_s=60.0))
    conduct = session()
    conduct.deltas.append(await to_logged(await agent.diff(incremental=True), factory._blobs, ""))
    result = await grade(task, conduct, factory)
    assert (await agent.poll_job(job)).running, "the loop ran all the while, in a sandbox that grading never saw"
    await agent.destroy()
    assert result.components["solved"] == 0.0
    assert result.notes == ["planted reward file ignored: ./reward.json"]


@pytest.mark.parametrize(
    "changes",
    [
        [
            made(".verifier-files"),
            wrote(".verifier-files/check.py", "pass\n"),
            wrote(".verifier-files/conftest.py", ""),
        ],
        [FileChange(path=".verifier-files", kind="symlink", content=b"evil"), made("evil"), wrote("evil/extra", "x")],
        [wrote(".verifier-files", "a file in the way\n")],
    ],
    ids=["files", "link", "file"],
)
async def test_what_is_planted_where_verifier_files_are_staged_is_removed(
    factory: SandboxFactory, changes: list[FileChange]
) -> None:
    counts = "test \"$(ls -A /tests | sort | tr '\\n' ' ')\" = 'check.py test.sh ' && test ! -L /tests || exit 9\n"
    result = await grade(scripted(counts + HONEST, check=CHECK), session(*changes), factory)
    assert result.components["solved"] == 0.0
    assert "planted .verifier-files removed" in result.notes


UNGRADED: dict[str, tuple[str, str]] = {
    "exits early with 0": ("exit 0", "ended with 0 and wrote no reward"),
    "exits early with 3": ("exit 3", "ended with 3 and wrote no reward"),
    "runs too long": ("sleep 300", "ran past 2 s"),
    "writes an empty file": (": > /logs/verifier/reward.txt", "wrote no reward"),
    "writes NaN": ("echo NaN > /logs/verifier/reward.txt", "'NaN', expected 0 to 1"),
    "writes 7": ("echo 7 > /logs/verifier/reward.txt", "'7', expected 0 to 1"),
    "is killed": ("kill -9 $$", "ended with 137 and wrote no reward"),
}


@pytest.mark.parametrize(("line", "cause"), UNGRADED.values(), ids=UNGRADED)
async def test_case_agent_lightning_308_a_grader_that_did_not_judge_is_ungraded(
    factory: SandboxFactory, line: str, cause: str
) -> None:
    """Guarantee 11: kept out of the group's mean, with its cause; never a zero."""
    with pytest.raises(GraderCouldNotRun, match=cause):
        await grade(scripted(line, seconds=2.0 if "sleep" in line else 60.0), session(), factory)


# -- start-up commands ----------------------------------------------------------------------------------------------


async def tree(sandbox: Sandbox) -> dict[str, Any]:
    stats = {stat.path: (stat.kind, stat.mode, stat.target) for stat in await sandbox.list(recursive=True)}
    return {"stats": stats, "files": dict(await sandbox.download())}


SETUP = [
    "printf 'MODE=fast\\n' > env.sh && export MODE=fast",
    "mkdir made && chmod 700 made && cp shop.py made/copy.py",
]


async def test_case_swe_agent_1461_recorded_start_up_commands_are_run_again(factory: SandboxFactory) -> None:
    """SWE-agent/SWE-agent PR 1461: a replay in a fresh sandbox has the start-up's files, and as little of its variables
    as the first start had: a command's environment ends with the command, in the first run as in every later one."""
    start = WorkspaceStart(TASK.image, {"shop.py": BUGGY.encode()}, SETUP)
    first = await factory.open(start, [], label="session")
    assert (await first.diff(incremental=True)).entries == (), "start-up is not the first call's doing"
    await first.write("made/copy.py", RIGHT.encode())
    delta = await to_logged(await first.diff(incremental=True), factory._blobs, "")
    assert [change.path for change in delta.changes] == ["made/copy.py"]
    again = await factory.open(start, [delta], label="replay")
    try:
        assert await tree(again) == await tree(first)
        seen = [(await box.exec(ExecRequest(shell="cat env.sh; echo ${MODE-unset}"))).stdout for box in (first, again)]
        assert seen == ["MODE=fast\nunset\n"] * 2
    finally:
        await first.destroy()
        await again.destroy()


async def test_a_start_up_command_that_cannot_be_run_again_is_refused_by_name(factory: SandboxFactory) -> None:
    start = WorkspaceStart(TASK.image, {}, ["true", "cat not-there.cfg"])
    with pytest.raises(SandboxSpecError, match=r"failed with 1: 'cat not-there.cfg'"):
        await factory.open(start, [], label="replay")


async def test_the_grader_sees_what_the_start_up_made(factory: SandboxFactory) -> None:
    task = TaskPublished(
        task_id="s", instruction="x", files={"shop.in": RIGHT}, setup=["cp shop.in shop.py"], tests=TESTS
    )
    assert ids(await grade(task, session(), factory)) == (ALL, [])
