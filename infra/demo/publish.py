"""The demo's tasks as events: what a generated task looks like to the controller."""

from __future__ import annotations

from typing import Literal

from odradek.infra.demo.family.task import DemoTask
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished


def published(
    task: DemoTask,
    *,
    attempts: int,
    purpose: Literal["rl", "eval"] = "rl",
    policy_version: int | None = None,
    temperature: float = 1.0,
) -> TaskPublished:
    """The event of a generated task. Hidden cases travel on the log; they enter neither image nor workspace."""
    suffix = "" if policy_version is None else f"@v{policy_version}t{temperature:g}"
    return TaskPublished(
        task_id=f"{task.id}{suffix}",
        instruction=task.instruction,
        files=task.files,
        tests=HiddenTests(
            module=task.target_path.removesuffix(".py"),
            function=task.function,
            cases=[HiddenCase(id=case.id, args=case.args, want=case.want) for case in task.hidden],
            fail_to_pass=task.fail_to_pass,
            pass_to_pass=task.pass_to_pass,
        ),
        purpose=purpose,
        attempts=attempts,
        deadline_seconds=180.0,
        policy_version=policy_version,
        temperature=temperature,
        labels={"set": task.set, "template": task.template},
    )
