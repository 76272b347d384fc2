"""Task directories in Harbor's layout.

    task.toml                    limits and metadata; ours in [odradek]
    instruction.md               what the agent is asked (one final newline is not part of it)
    environment/workspace/       the files the agent starts with
    environment/recipe.toml      image and set-up commands (optional; a Dockerfile beside it is not read, and said so)
    tests/hidden.json            hidden cases; or tests/test.sh, which writes /logs/verifier/reward.txt
    solution/                    reference solution, for people and for checks of the task

`load_task_dir` reads one and refuses a broken one with file and line; `load_tasks` reads a directory of them, and one
broken directory refuses the whole set, so that a smaller set never passes for the full one. `write_task_dir` writes
what `load_task_dir` reads back unchanged. Hidden tests and solution never end up in the workspace: they are read from
other folders, and links are refused everywhere.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from odradek.actors.tasks.config import Recipe, TaskToml, read_bytes, read_toml, toml_value
from odradek.actors.tasks.errors import BrokenTasks, TaskError, TaskFileError
from odradek.actors.tasks.refusal import MAX_TREE_BYTES
from odradek.actors.tasks.spec import DEFAULT_IMAGE, TaskSpec, hidden_tests_json, parse_hidden_tests
from odradek.streams.events.tasks import HiddenTests

TASK_FILE = "task.toml"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def load_tasks(path: Path) -> list[TaskSpec]:
    """The task at `path`, or all tasks directly under it, by name; all of them or none."""
    if (path / TASK_FILE).exists():
        return [load_task_dir(path)]
    if not path.is_dir():
        raise TaskFileError(path, None, "is not a directory")
    folders = sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
    if not folders:
        raise TaskFileError(path, None, f"has neither {TASK_FILE} nor task directories in it")
    found: list[TaskSpec] = []
    faults: list[TaskFileError] = []
    for folder in folders:
        try:
            found.append(load_task_dir(folder))
        except TaskFileError as fault:
            faults.append(fault)
    if faults:
        raise BrokenTasks(faults, len(folders))
    return found


def load_task_dir(path: Path) -> TaskSpec:
    """Read and check one task directory. Raises `TaskFileError`, one line naming file and line."""
    if not _NAME.fullmatch(path.resolve().name):
        raise TaskFileError(path, None, "the directory's name is the task's id: letters, digits, '.', '_' and '-' only")
    config = read_toml(path / TASK_FILE, TaskToml)
    instruction = _text(path / "instruction.md").removesuffix("\n")
    if not instruction.strip():
        raise TaskFileError(path / "instruction.md", 1, "is empty")
    recipe_path = path / "environment" / "recipe.toml"
    recipe = read_toml(recipe_path, Recipe) if recipe_path.exists() else Recipe()
    workspace = path / "environment" / "workspace"
    if not workspace.exists():
        raise TaskFileError(workspace, None, "is missing: the agent's starting files belong there (no image is built)")
    files, executable = read_tree(workspace)
    if history := next((name for name in files if ".git" in name.split("/")), None):
        reason = "is part of a repository's history, where later commits may hold the fix; leave .git out"
        raise TaskFileError(workspace / history, None, reason)
    test_files, _ = read_tree(path / "tests")
    solution = read_tree(path / "solution")[0] if (path / "solution").exists() else {}
    return TaskSpec(
        name=path.resolve().name,
        instruction=instruction,
        files=files,
        executable=executable,
        tests=_hidden_tests(path, test_files),
        test_files=test_files,
        solution=solution,
        image=recipe.image,
        setup=recipe.setup,
        limits=config.limits(),
        metadata=config.metadata,
        labels=config.odradek.labels,
        notes=_notes(path, recipe_path.exists(), recipe.image),
    )


def _hidden_tests(path: Path, test_files: dict[str, bytes]) -> HiddenTests | None:
    where = path / "tests" / "hidden.json"
    if "hidden.json" not in test_files:
        if "test.sh" in test_files:
            return None
        raise TaskFileError(path / "tests", None, "has neither hidden.json nor test.sh")
    try:
        return parse_hidden_tests(test_files["hidden.json"])
    except ValueError as error:
        raise TaskFileError(where, _json_line(test_files["hidden.json"], str(error)), str(error)) from error


def _json_line(data: bytes, message: str) -> int | None:
    at = re.search(r"\(byte (\d+)\)", message)
    return data.count(b"\n", 0, int(at[1])) + 1 if at else None


def _notes(path: Path, has_recipe: bool, image: str) -> list[str]:
    names = ("Dockerfile", "docker-compose.yaml")
    unread = [name for name in names if (path / "environment" / name).exists()]
    how = "environment/recipe.toml" if has_recipe else "no environment/recipe.toml, so the default"
    return [f"{path.name}: environment/{name} is not read; image {image!r} is used ({how})" for name in unread]


def _text(path: Path) -> str:
    data = read_bytes(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskFileError(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from error


def read_tree(root: Path) -> tuple[dict[str, bytes], frozenset[str]]:
    """All regular files under a folder, by path, and which are executable. Links and special files are refused."""
    if root.is_symlink() or not root.is_dir():
        raise TaskFileError(root, None, "is a link" if root.is_symlink() else "is missing")
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    total = 0
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted([*names, *(one for one in folders if Path(folder, one).is_symlink())]):
            path = Path(folder, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                raise TaskFileError(path, None, "is a link or a special file; a task may hold regular files only")
            total += status.st_size
            if total > MAX_TREE_BYTES:
                raise TaskFileError(root, None, f"holds more than {MAX_TREE_BYTES // 2**20} MiB")
            inside = path.relative_to(root).as_posix()
            files[inside] = read_bytes(path)
            if status.st_mode & 0o100:
                executable.add(inside)
    return files, frozenset(executable)


def write_task_dir(task: TaskSpec, path: Path) -> None:
    """Write a task as a new directory named after it. Raises `TaskError` if the directory exists or is named else."""
    if path.name != task.name or not _NAME.fullmatch(task.name):
        raise TaskError(f"task {task.name!r} must be written to a directory of its name, not {path.name!r}")
    if path.exists():
        raise TaskError(f"{path} exists; a task directory is never overwritten")
    tests = dict(task.test_files)
    if task.tests is not None:
        tests["hidden.json"] = hidden_tests_json(task.tests)
    _write(path / TASK_FILE, _task_toml(task).encode())
    _write(path / "instruction.md", (task.instruction + "\n").encode())
    recipe = f"image = {toml_value(task.image)}\nsetup = {toml_value(task.setup)}\n"
    if task.setup or task.image != DEFAULT_IMAGE:
        _write(path / "environment" / "recipe.toml", recipe.encode())
    trees = (
        (path / "environment" / "workspace", task.files),
        (path / "tests", tests),
        (path / "solution", task.solution),
    )
    for root, files in trees:
        if root.name != "solution" or files:
            root.mkdir(parents=True)
        for name, data in files.items():
            _write(_inside(root, name), data, executable=root.name == "workspace" and name in task.executable)


def _inside(root: Path, name: str) -> Path:
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or "\0" in name:
        raise TaskError(f"{name!r} is no relative path of a file")
    return root.joinpath(*parts)


def _write(path: Path, data: bytes, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if executable:
        path.chmod(0o755)


def _task_toml(task: TaskSpec) -> str:
    limits, budget = task.limits, task.limits.budget
    own: dict[str, object] = {
        "attempts": limits.attempts,
        "priority": limits.priority,
        "deadline_seconds": limits.deadline_seconds,
        "purpose": limits.purpose,
        "max_turns": budget.max_turns,
        "max_turn_tokens": budget.max_turn_tokens,
        "max_context_tokens": budget.max_context_tokens,
        "tool_seconds": budget.tool_seconds,
    }
    if task.labels:
        own["labels"] = task.labels
    tables: dict[str, dict[str, object]] = {
        "metadata": task.metadata,
        "agent": {"timeout_sec": budget.wall_seconds},
        "verifier": {"timeout_sec": limits.grading_seconds},
        "odradek": own,
    }
    lines = ['schema_version = "1.1"']
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{toml_value(key)} = {toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"
