"""`TaskSpec`: a task as data, whatever it came from, and its packed form (the `task.published.v1` event).

What the agent may see (`instruction`, `files`) and what only the grader may (`tests`, `test_files`, `solution`) are
separate fields, and packing puts only the former where a workspace is made from.
"""

from __future__ import annotations

import hashlib
import shlex
from typing import Literal

import msgspec

from odradek.actors.environment.archive import pack
from odradek.actors.tasks.errors import TaskNotPublishable
from odradek.actors.tasks.refusal import MAX_COMMAND_BYTES, hidden_tests_fault
from odradek.sandbox_images.tree import FileSpec
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.tasks import Budget, HiddenCase, HiddenScript, HiddenTests, TaskPublished
from odradek.streams.privacy.names import SHARED

MAX_INLINE_BYTES = 4 * 1024 * 1024
"""Bytes of workspace and hidden files that one event may carry. Higher nears the log's limit for a record (8 MiB) once
they are escaped as text; lower needs an object store for tasks that the log can hold. Events of tasks are rare, so
their size costs little. A larger workspace travels as a tar in the object store."""

DEFAULT_IMAGE = "demo"

SHELL = '"$(command -v bash || command -v sh)"'
"""Runs a task's scripts: bash, which Harbor's are written for, or the POSIX shell of an image that has no bash."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt and its grading may use, and how the task is run."""

    budget: Budget = Budget()
    grading_seconds: float = 60.0
    attempts: int = 8
    priority: int = 0
    deadline_seconds: float = 900.0
    purpose: Literal["rl", "eval"] = "rl"


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One task. `files` and the others map paths with `/` to bytes; `executable` names the files with that bit."""

    name: str
    instruction: str
    files: dict[str, bytes]
    executable: frozenset[str] = frozenset()
    tests: HiddenTests | None = None
    test_files: dict[str, bytes] = {}
    solution: dict[str, bytes] = {}
    image: str = DEFAULT_IMAGE
    setup: list[str] = []
    limits: Limits = Limits()
    metadata: dict[str, object] = {}
    labels: dict[str, str] = {}
    notes: list[str] = []
    """What was read and left unused, in words for the person who publishes."""

    def hidden_tests_json(self) -> bytes:
        """The grader's file; empty if the task is graded by a script."""
        return hidden_tests_json(self.tests) if self.tests else b""

    @property
    def inline(self) -> bool:
        """Whether the event carries the workspace: text, and small enough."""
        return self._size(self.files) + self._size(self.test_files) <= MAX_INLINE_BYTES and all(
            map(_is_text, self.files.values())
        )

    def tar(self) -> bytes:
        """The workspace as the object that an event refers to where it can't carry it."""
        modes = {path: 0o755 if path in self.executable else 0o644 for path in self.files}
        return pack({path: FileSpec(data, modes[path]) for path, data in self.files.items()})

    @staticmethod
    def _size(files: dict[str, bytes]) -> int:
        return sum(map(len, files.values()))

    def published(self) -> TaskPublished:
        """The event. What it refers to (`tar`, where the workspace is not `inline`) is stored before it is written.
        Raises `TaskNotPublishable` for hidden files that are too large.

        Executable bits travel as a set-up command, since the workspace in an event is paths and text.
        """
        if (size := self._size(self.test_files)) > MAX_INLINE_BYTES:
            raise TaskNotPublishable(
                f"task {self.name}: tests hold {size} bytes, and an event carries at most {MAX_INLINE_BYTES}; put "
                f"large parts into the image"
            )
        inline = self.inline
        return TaskPublished(
            task_id=self.name,
            instruction=self.instruction,
            files={path: data.decode() for path, data in self.files.items()} if inline else {},
            files_ref=None if inline else shared_ref(self.tar()),
            tests=self.tests,
            script=self._script(),
            image=self.image,
            setup=[*(self._make_executable() if inline else ()), *self.setup],
            purpose=self.limits.purpose,
            attempts=self.limits.attempts,
            priority=self.limits.priority,
            deadline_seconds=self.limits.deadline_seconds,
            budget=self.limits.budget,
            labels=self.labels,
        )

    def _make_executable(self) -> list[str]:
        """In as many commands as their length asks for."""
        commands: list[str] = []
        for path in sorted(self.executable):
            part = f" {shlex.quote(path)}"
            if not commands or len(f"{commands[-1]}{part}".encode()) > MAX_COMMAND_BYTES:
                commands.append("chmod 755 --")
            commands[-1] += part
        return commands

    def _script(self) -> HiddenScript | None:
        """The verifier of a task without hidden cases: everything under tests/, and its test.sh."""
        if self.tests is not None:
            return None
        command = f"{SHELL} /tests/test.sh"
        return HiddenScript(files=self.test_files, command=command, timeout_seconds=self.limits.grading_seconds)


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def shared_ref(data: bytes) -> BlobRef:
    """Where an object that is nobody's lies, as `BlobStore.put` will store it."""
    digest = hashlib.sha256(data).hexdigest()
    return BlobRef(key=f"blobs/{SHARED}/{digest}", sha256=digest, size=len(data))


class _HiddenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tests/hidden.json`: the public names of test lists are upper-case there, as in SWE-bench rows."""

    module: str
    function: str
    cases: list[_HiddenCaseRow]
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str] = []


class _HiddenCaseRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    args: list[object]
    want: object


def hidden_tests_json(tests: HiddenTests) -> bytes:
    """`tests/hidden.json` of some tests."""
    rows = [_HiddenCaseRow(case.id, case.args, case.want) for case in tests.cases]
    file = _HiddenFile(tests.module, tests.function, rows, tests.fail_to_pass, tests.pass_to_pass)
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def parse_hidden_tests(data: bytes) -> HiddenTests:
    """Read and check `tests/hidden.json`. Raises `ValueError` (msgspec's included) with what is wrong."""
    file = msgspec.json.decode(data, type=_HiddenFile)
    cases = [HiddenCase(id=row.id, args=row.args, want=row.want) for row in file.cases]
    tests = HiddenTests(
        module=file.module,
        function=file.function,
        cases=cases,
        fail_to_pass=file.FAIL_TO_PASS,
        pass_to_pass=file.PASS_TO_PASS,
    )
    if fault := hidden_tests_fault(tests):
        raise ValueError(fault)
    return tests
