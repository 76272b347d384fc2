"""Demo tasks in the forms the rest of the product takes: a `TaskSpec` (task directory) and a published task.

There is one conversion, `as_spec`; the event is what any task directory publishes as.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from odradek.actors.tasks.spec import Limits, TaskSpec
from odradek.infra.demo.family.task import DemoTask
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished

DEADLINE_S = 180.0
"""Seconds from admission until a demo group is sealed without its stragglers. Too low drops slow rollouts; too high
keeps a batch waiting for one of them."""


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


def published(
    task: DemoTask,
    *,
    attempts: int,
    purpose: Literal["rl", "eval"] = "rl",
    policy_version: int | None = None,
    temperature: float = 1.0,
    policy: str = "demo",
) -> TaskPublished:
    """The event of a generated task. Hidden cases travel on the log; they enter neither image nor workspace.

    An evaluation of another version, or at another temperature, is another task: its id says which.
    """
    suffix = "" if policy_version is None else f"@v{policy_version}t{temperature:g}"
    event = as_spec(task, Limits(attempts=attempts, purpose=purpose, deadline_seconds=DEADLINE_S)).published()
    return msgspec.structs.replace(
        event, task_id=f"{event.task_id}{suffix}", policy=policy, policy_version=policy_version, temperature=temperature
    )
