"""From what a person names on a command line to the tasks to publish: all of them, checked, or none.

A source is a task directory, a directory of task directories, or a task file (`file.py`). Options given with them win
over what the files say. Nothing here reaches a network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from odradek.actors.tasks.directory import load_tasks
from odradek.actors.tasks.errors import BrokenTasks, TaskFileError, TaskNotPublishable
from odradek.actors.tasks.file import load_task_file
from odradek.actors.tasks.refusal import MAX_GRADING_SECONDS, refusal
from odradek.streams.events.tasks import TaskPublished

MAX_EVENT_BYTES = 7 * 1024 * 1024
"""Bytes of one task as an event. The log takes records up to 8 MiB; one that is refused there would be refused after
others of the same command had been published."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says; None leaves what the task says."""

    attempts: int | None = None
    deadline_seconds: float | None = None
    priority: int | None = None
    policy_version: int | None = None
    purpose: Literal["rl", "eval"] | None = None
    policy: str | None = None
    """Of tasks that name none, which reads as the event's default."""
    idempotency_key: str | None = None
    """Of one task. Of several, each gets KEY/TASK_ID, so that they do not become one."""


DEFAULTS = Options()
DEFAULT_POLICY = TaskPublished(task_id="", instruction="").policy


class Sources(msgspec.Struct, frozen=True):
    """What was named."""

    tasks: list[TaskPublished]
    notes: list[str]
    """For the person: what was read and left unused, or is not given as asked."""
    trees: list[bytes]
    """Workspaces that an event can't carry: to be put into the object store before the tasks are published."""


def load_sources(paths: Sequence[Path], options: Options = DEFAULTS) -> Sources:
    """The tasks in order. Raises `TaskError`."""
    tasks: list[TaskPublished] = []
    notes: list[str] = []
    trees: list[bytes] = []
    faults: list[TaskFileError] = []
    total = 0
    for path in paths:
        try:
            found, said, large = _load(path)
        except BrokenTasks as broken:
            faults, total = [*faults, *broken.faults], total + broken.total
        except TaskFileError as fault:
            faults, total = [*faults, fault], total + 1
        else:
            tasks, notes, trees, total = [*tasks, *found], [*notes, *said], [*trees, *large], total + len(found)
    if len(faults) == 1 and total == 1:
        raise faults[0]
    if faults:
        raise BrokenTasks(faults, total)
    tasks = [_with(task, options, alone=len(tasks) == 1) for task in tasks]
    _check(tasks)
    return Sources(tasks, [*notes, *(note for task in tasks for note in _cut(task))], trees)


def _load(path: Path) -> tuple[list[TaskPublished], list[str], list[bytes]]:
    if not path.is_dir():
        return [load_task_file(path)], [], []
    specs = load_tasks(path)
    notes = [note for spec in specs for note in spec.notes]
    return [spec.published() for spec in specs], notes, [spec.tar() for spec in specs if not spec.inline]


def _cut(task: TaskPublished) -> list[str]:
    if task.script is None or task.script.timeout_seconds <= MAX_GRADING_SECONDS:
        return []
    wanted, given = task.script.timeout_seconds, MAX_GRADING_SECONDS
    return [f"{task.task_id}: its verifier may take {wanted:g} s; it gets {given:g}, and is ungraded past them"]


def _with(task: TaskPublished, options: Options, *, alone: bool) -> TaskPublished:
    given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    if task.policy != DEFAULT_POLICY:
        given.pop("policy", None)
    key = given.get("idempotency_key")
    if key and not alone:
        given["idempotency_key"] = f"{key}/{task.task_id}"
    return msgspec.structs.replace(task, **given)


def _check(tasks: Sequence[TaskPublished]) -> None:
    for task in tasks:
        fault = refusal(task)
        if fault is not None:
            raise TaskNotPublishable(f"task {task.task_id!r}: {fault}")
        size = len(msgspec.msgpack.encode(task))
        if size > MAX_EVENT_BYTES:
            raise TaskNotPublishable(f"task {task.task_id}: its event has {size} bytes, and at most {MAX_EVENT_BYTES}")
    keys = Counter(task.idempotency_key or task.task_id for task in tasks)
    repeated = [key for key, count in keys.items() if count > 1]
    if repeated:
        raise TaskNotPublishable(f"task {repeated[0]!r} is given {keys[repeated[0]]} times, and would be one task")
