"""`TaskSpec`: a task as data, whatever it came from, and its packed form (the `task.published.v1` event).

What the agent may see (`instruction`, `files`) and what only the grader may (`tests`, `test_files`, `solution`) are
separate fields, and packing puts only the former where a workspace is made from.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from typing import Literal

import msgspec

from odradek.actors.tasks.errors import TaskNotPublishable
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.tasks import Budget, HiddenCase, HiddenTests, TaskPublished

MAX_INLINE_BYTES = 128 * 1024
"""Workspace bytes carried in the event itself. Higher nears the log's 256 KiB claim check with tests and instruction
added; lower makes an object of every small package."""

DEFAULT_IMAGE = "demo"

PutBlob = Callable[[bytes], BlobRef]


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

    def published(self, put_blob: PutBlob | None = None, *, idempotency_key: str = "") -> TaskPublished:
        """The event. A workspace that is binary, has executables or is large needs `put_blob` for its tar."""
        if self.tests is None:
            raise TaskNotPublishable(
                f"task {self.name}: has no tests/hidden.json, and a grading script is not run by this version; "
                "write its checks as hidden cases (module, function, cases)"
            )
        files, ref = self._workspace(put_blob)
        return TaskPublished(
            task_id=self.name,
            instruction=self.instruction,
            files=files,
            files_ref=ref,
            tests=self.tests,
            image=self.image,
            setup=self.setup,
            purpose=self.limits.purpose,
            attempts=self.limits.attempts,
            priority=self.limits.priority,
            deadline_seconds=self.limits.deadline_seconds,
            budget=self.limits.budget,
            idempotency_key=idempotency_key,
            labels=self.labels,
        )

    def _workspace(self, put_blob: PutBlob | None) -> tuple[dict[str, str], BlobRef | None]:
        inline = _as_text(self.files)
        if inline is not None and not self.executable:
            return inline, None
        if put_blob is None:
            raise TaskNotPublishable(
                f"task {self.name}: its workspace is binary, has executables or exceeds {MAX_INLINE_BYTES} bytes; "
                "publish it with a reachable object store"
            )
        return {}, put_blob(workspace_tar(self.files, self.executable))


def _as_text(files: dict[str, bytes]) -> dict[str, str] | None:
    if sum(map(len, files.values())) > MAX_INLINE_BYTES:
        return None
    try:
        return {path: data.decode("utf-8") for path, data in files.items()}
    except UnicodeDecodeError:
        return None


def workspace_tar(files: dict[str, bytes], executable: frozenset[str] = frozenset()) -> bytes:
    """A tar of a workspace; the same files give the same bytes (no times, owners or order of listing in it)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(files):
            entry = tarfile.TarInfo(path)
            entry.size = len(files[path])
            entry.mode = 0o755 if path in executable else 0o644
            tar.addfile(entry, io.BytesIO(files[path]))
    return buffer.getvalue()


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
    ids = [row.id for row in file.cases]
    listed = [*file.FAIL_TO_PASS, *file.PASS_TO_PASS]
    if repeated := sorted({one for one in ids if ids.count(one) > 1}):
        raise ValueError(f"case id {repeated[0]!r} is given twice")
    if twice := sorted({one for one in listed if listed.count(one) > 1}):
        raise ValueError(f"case id {twice[0]!r} is listed twice in FAIL_TO_PASS and PASS_TO_PASS")
    if unknown := sorted(set(listed) - set(ids)):
        raise ValueError(f"FAIL_TO_PASS or PASS_TO_PASS lists {unknown[0]!r}, which is no case")
    if not file.FAIL_TO_PASS:
        raise ValueError("FAIL_TO_PASS is empty, so the untouched workspace would already be solved")
    cases = [HiddenCase(id=row.id, args=row.args, want=row.want) for row in file.cases]
    return HiddenTests(
        module=file.module,
        function=file.function,
        cases=cases,
        fail_to_pass=file.FAIL_TO_PASS,
        pass_to_pass=file.PASS_TO_PASS,
    )
