"""Harbor-style task directories: what is written is read back, and a broken one is refused with file and line."""

import copy
import hashlib
import io
import pickle
import re
import tarfile
from pathlib import Path

import msgspec
import pytest

from odradek.actors.environment.archive import unpack
from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.tasks.directory import load_task_dir, load_tasks, write_task_dir
from odradek.actors.tasks.errors import BrokenTasks, TaskError, TaskFileError, TaskNotPublishable
from odradek.actors.tasks.refusal import refusal
from odradek.actors.tasks.spec import MAX_INLINE_BYTES, Limits, TaskSpec
from odradek.infra.demo.family.sets import TASK_SETS, TaskSet, make_task
from odradek.infra.demo.publish import as_spec, for_its_purpose
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.tasks import Budget, TaskPublished


def spec(index: int = 0, set_name: TaskSet = "train") -> TaskSpec:
    return as_spec(make_task(set_name, 3, index))


def written(tmp_path: Path, index: int = 0) -> Path:
    task = spec(index)
    path = tmp_path / task.name
    write_task_dir(task, path)
    return path


@pytest.mark.parametrize("set_name", TASK_SETS)
def test_a_written_task_is_read_back_unchanged(set_name: TaskSet, tmp_path: Path) -> None:
    for index in range(5):
        task = for_its_purpose(make_task(set_name, 4, index))
        write_task_dir(task, tmp_path / task.name)
        read = load_task_dir(tmp_path / task.name)
        assert msgspec.structs.replace(read, test_files={}) == task
        assert read.published() == task.published()


def test_limits_metadata_set_up_and_executables_survive(tmp_path: Path) -> None:
    limits = Limits(budget=Budget(max_turns=9, wall_seconds=12.5), attempts=3, priority=-1, purpose="eval")
    task = msgspec.structs.replace(
        spec(),
        name="own",
        instruction='Mend "it"\n\n\tthen stop.\n',
        files={"bin/run.sh": b"#!/bin/sh\n", "data.bin": b"\xff\x00", "a b/\u00e9.txt": b""},
        executable=frozenset({"bin/run.sh"}),
        setup=["printf 'a\\n\x7f' > x"],
        image="sha256:0",
        limits=limits,
        metadata={"tags": ["x", 'y"\\'], "nested": {"deep": 1.5}, "ok": True},
        labels={"set": "own \u2028"},
    )
    write_task_dir(task, tmp_path / "own")
    assert msgspec.structs.replace(load_task_dir(tmp_path / "own"), test_files={}) == task


def test_the_packed_form_holds_no_hidden_test_and_no_solution_in_the_workspace() -> None:
    demo = make_task("train", 5, 0)
    event = as_spec(demo).published()
    assert event.files == demo.files
    assert event.tests is not None and len(event.tests.cases) == len(demo.hidden)
    assert demo.fix.new not in "".join(event.files.values()) or demo.fix.new in "".join(demo.files.values())
    again = msgspec.json.decode(msgspec.json.encode(event), type=TaskPublished)
    assert again == event


def test_executable_bits_travel_as_a_set_up_command() -> None:
    files = {"bin/it's": b"#!/bin/sh\n", "b": b"1"}
    task = msgspec.structs.replace(spec(), files=files, executable=frozenset({"bin/it's", "b"}), setup=["./b"])
    event = task.published()
    assert event.setup == ["chmod 755 -- b 'bin/it'\"'\"'s'", "./b"]
    assert event.files == {path: data.decode() for path, data in files.items()}


@pytest.mark.parametrize(
    "files", [{"a.bin": b"\xff", "run": b"1"}, {"run": b"x" * (MAX_INLINE_BYTES + 1)}], ids=["binary", "large"]
)
def test_a_workspace_that_an_event_cannot_carry_is_named_in_it_and_is_the_same_tree(files: dict[str, bytes]) -> None:
    task = msgspec.structs.replace(spec(), files=files, executable=frozenset({"run"}))
    event = task.published()
    assert not task.inline and event.files == {} and event.setup == task.setup and refusal(event) is None
    tar = task.tar()
    assert event.files_ref == BlobRef(
        key=f"blobs/shared/{hashlib.sha256(tar).hexdigest()}", sha256=hashlib.sha256(tar).hexdigest(), size=len(tar)
    )
    tree = unpack(tar)
    assert {path: file.content for path, file in tree.items()} == files
    assert {path for path, file in tree.items() if file.mode == 0o755} == {"run"}


def test_hidden_files_that_an_event_cannot_carry_are_refused_naming_the_limit() -> None:
    large = msgspec.structs.replace(spec(), tests=None, test_files={"test.sh": b"x" * (MAX_INLINE_BYTES + 1)})
    with pytest.raises(TaskNotPublishable, match=str(MAX_INLINE_BYTES)):
        large.published()


def test_many_executables_are_set_in_commands_that_a_process_takes() -> None:
    names = frozenset(f"bin/{'n' * 200}{number}" for number in range(2000))
    task = msgspec.structs.replace(spec(), files=dict.fromkeys(names, b""), executable=names)
    event = task.published()
    assert task.inline and refusal(event) is None and len(event.setup) > 1
    assert sum(command.count("bin/") for command in event.setup) == len(names)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def entry(path: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"no tar", "can't be read"),
        (tar_of((entry("a"), b"x" * 2000))[:1200], "can't be read"),
        (tar_of((entry("../a"), b"")), "'../a' is no relative path"),
        (tar_of((entry("/etc/passwd"), b"")), "no relative path"),
        (tar_of((entry("a", tarfile.SYMTYPE, "/etc"), b"")), "'a' is a link or a special file"),
        (tar_of((entry("a", tarfile.LNKTYPE, "b"), b"")), "is a link or a special file"),
        (tar_of((entry("a", tarfile.CHRTYPE), b"")), "is a link or a special file"),
        (tar_of((entry(".git/HEAD"), b"")), "history"),
        (tar_of((entry("a"), b""), (entry("a/b"), b"")), "a folder"),
    ],
)
def test_a_strangers_tar_is_taken_only_as_plain_files_inside(data: bytes, fault: str) -> None:
    with pytest.raises(SandboxSpecError, match=re.escape(fault)):
        unpack(data)


def test_folders_and_leading_dots_of_a_tar_are_no_fault() -> None:
    data = tar_of((entry("./", tarfile.DIRTYPE), b""), (entry("./src/a.py"), b"1"), (entry("./b"), b"2"))
    assert {path: file.content for path, file in unpack(data).items()} == {"src/a.py": b"1", "b": b"2"}


def test_case_dsh_105_three_directories_with_the_second_broken_are_never_a_silent_two(tmp_path: Path) -> None:
    """oh-my-dsh/dsh-plugin-upgrade-skill PR 105: an invalid TOML escape dropped one task, the others ran."""
    paths = [written(tmp_path, index) for index in range(3)]
    broken = paths[1] / "task.toml"
    broken.write_text('schema_version = "1.1"\n\n[metadata]\ndescription = "matches \\d+"\n')
    with pytest.raises(BrokenTasks) as caught:
        load_tasks(tmp_path)
    (fault,) = caught.value.faults
    assert (fault.path, fault.line) == (broken, 4)
    assert f"{broken}:4: " in str(caught.value)
    assert "1 of 3" in str(caught.value)
    with pytest.raises(TaskFileError) as alone:
        load_task_dir(paths[1])
    assert str(alone.value).count("\n") == 0 and str(alone.value).startswith(f"{broken}:4: ")


def test_a_directory_of_whole_tasks_is_read_in_order_of_name(tmp_path: Path) -> None:
    names = [written(tmp_path, index).name for index in range(3)]
    (tmp_path / ".git").mkdir()
    assert [task.name for task in load_tasks(tmp_path)] == sorted(names)
    assert [task.name for task in load_tasks(tmp_path / names[0])] == [names[0]]


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("attempts = 8", 'attempts = "8"', "Expected `int`, got `str`"),
        ("attempts = 8", "atempts = 8", "unknown field `atempts`"),
        ("[agent]", "[agnt]", "unknown field `agnt`"),
        ("attempts = 8", "attempts = ", "Invalid value"),
        ("attempts = 8", "attempts = 8\nattempts = 9", "Cannot overwrite a value"),
    ],
)
def test_a_fault_in_task_toml_is_named_with_its_line(old: str, new: str, reason: str, tmp_path: Path) -> None:
    path = written(tmp_path) / "task.toml"
    text = path.read_text().replace(f'"{old.split()[0]}" =', f"{old.split()[0]} =")
    assert old in text
    path.write_text(text.replace(old, new))
    line = path.read_text().split("\n").index(new.split("\n")[-1]) + 1
    with pytest.raises(TaskFileError) as caught:
        load_task_dir(path.parent)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def _remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (lambda d: _remove(d / "task.toml"), "task.toml: is missing"),
        (lambda d: _remove(d / "instruction.md"), "instruction.md: is missing"),
        (lambda d: (d / "instruction.md").write_text(" \n"), "instruction.md:1: is empty"),
        (lambda d: (d / "instruction.md").write_bytes(b"a\n\xff"), "instruction.md:2: is not UTF-8"),
        (lambda d: _remove(d / "tests" / "hidden.json"), "tests: has neither hidden.json nor test.sh"),
        (lambda d: (d / "tests" / "hidden.json").write_text("{\n\n!"), "hidden.json:3: "),
        (lambda d: _edit(d / "tests" / "hidden.json", '"FAIL_TO_PASS": [', '"FAIL_TO_PASS": ["no such", '), "no such"),
        (lambda d: (d / "environment" / "workspace" / "x").symlink_to("/etc/passwd"), "is a link or a special file"),
        (lambda d: (d / "environment" / "workspace" / "d").symlink_to("/etc"), "is a link or a special file"),
    ],
)
def test_a_broken_directory_is_refused_in_one_line(breaks, reason: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = written(tmp_path)
    breaks(path)
    with pytest.raises(TaskFileError) as caught:
        load_task_dir(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_case_swe_bench_465_a_workspace_never_carries_a_history_that_could_hold_the_fix(tmp_path: Path) -> None:
    """SWE-bench/SWE-bench #465: later commits with the fix were reachable in the sandbox."""
    path = written(tmp_path)
    (path / "environment" / "workspace" / ".git" / "logs").mkdir(parents=True)
    (path / "environment" / "workspace" / ".git" / "logs" / "HEAD").write_text("")
    with pytest.raises(TaskFileError, match=r"workspace/\.git/logs/HEAD: is part of a repository's history"):
        load_task_dir(path)


def test_a_task_without_a_failing_test_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    hidden = msgspec.json.decode((path / "tests" / "hidden.json").read_bytes())
    (path / "tests" / "hidden.json").write_bytes(msgspec.json.encode({**hidden, "FAIL_TO_PASS": []}))
    with pytest.raises(TaskFileError, match="already be solved"):
        load_task_dir(path)


def test_a_dockerfile_is_not_built_and_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path)
    (path / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (note,) = load_task_dir(path).notes
    assert "environment/Dockerfile is not read; image 'demo' is used" in note


def test_a_task_with_a_script_publishes_its_files_as_the_hidden_verifier(tmp_path: Path) -> None:
    path = written(tmp_path)
    (path / "tests" / "hidden.json").unlink()
    (path / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (path / "tests" / "data.bin").write_bytes(b"\xff")
    event = load_task_dir(path).published()
    assert event.tests is None and event.script is not None
    assert event.script.files == {"test.sh": b"echo 1 > /logs/verifier/reward.txt\n", "data.bin": b"\xff"}
    assert event.script.command.endswith(" /tests/test.sh") and event.script.timeout_seconds == 60.0
    assert not set(event.files) & {"test.sh", "data.bin"}


def test_an_existing_directory_is_never_overwritten_and_paths_stay_inside(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(TaskError, match="exists"):
        write_task_dir(spec(), path)
    outside = msgspec.structs.replace(spec(1), files={"../../x": b""})
    with pytest.raises(TaskError, match="no relative path"):
        write_task_dir(outside, tmp_path / outside.name)


def test_errors_cross_processes_whole() -> None:
    fault = TaskFileError(Path("t/task.toml"), 3, "is  odd\nhere")
    for error in (fault, BrokenTasks([fault], 2)):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) == str(copy.copy(error))
