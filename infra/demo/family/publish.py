"""Demo tasks in the forms the rest of the product takes: a `TaskSpec` (task directory) and a published task."""

from __future__ import annotations

from typing import Literal

import msgspec

from odradek.actors.tasks.spec import Limits, TaskSpec
from odradek.infra.demo.family.task import DemoTask
from odradek.streams.events.tasks import HiddenCase, HiddenTests


def as_spec(task: DemoTask, limits: Limits | None = None) -> TaskSpec:
    """The task with its reference fix as solution; `labels` carry set and template for the reports."""
    fixed = task.files[task.target_path].replace(task.fix.old, task.fix.new)
    return TaskSpec(
        name=task.id,
        instruction=task.instruction,
        files={path: text.encode() for path, text in task.files.items()},
        tests=HiddenTests(
            module=task.target_path.removesuffix(".py"),
            function=task.function,
            cases=[HiddenCase(id=case.id, args=list(case.args), want=case.want) for case in task.hidden],
            fail_to_pass=task.fail_to_pass,
            pass_to_pass=task.pass_to_pass,
        ),
        solution={task.target_path: fixed.encode()},
        limits=limits or Limits(),
        labels={"set": task.set, "template": task.template},
    )


def purpose_of(task: DemoTask) -> Literal["rl", "eval"]:
    """Held-out sets are for evaluation only; publishing one for training would be refused."""
    return "rl" if task.set == "train" else "eval"


def for_its_purpose(task: DemoTask, limits: Limits | None = None) -> TaskSpec:
    """`as_spec` with the purpose that the task's set allows."""
    return as_spec(task, msgspec.structs.replace(limits or Limits(), purpose=purpose_of(task)))
