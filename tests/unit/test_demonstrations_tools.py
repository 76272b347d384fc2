"""What demonstrations show as tool output is what the real tools print: else the policy learns a world that is not."""

import random
import sys
from pathlib import Path

import pytest
from support.local_workspace import LocalWorkspace

from odradek.actors.policy.template import Call
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import run_call
from odradek.infra.demo.demonstrations.emulation import EmulatedWorkspace
from odradek.infra.demo.demonstrations.scripted import TEST, Habits, demonstration, edit, read
from odradek.infra.demo.demonstrations.stream import shipped_template
from odradek.infra.demo.family.sets import TASK_SETS, TaskSet, make_task
from odradek.infra.demo.family.task import DemoTask

TASKS = 10
"""Sessions compared; each starts a few interpreters."""


def written(folder: Path, task: DemoTask) -> Path:
    folder.mkdir()
    for path, text in task.files.items():
        (folder / path).write_text(text)
    return folder


async def real_outputs(folder: Path, task: DemoTask, calls: list[Call]) -> list[str]:
    workspace, outputs = LocalWorkspace(folder), []
    for call in calls:
        arguments = dict(call.arguments)
        if call == TEST:  # the demo's image has `python` and writes no byte code; this machine may do neither
            arguments["command"] = f"{sys.executable} -B test.py"
        outcome = await run_call(workspace, call.name, arguments, Limits())
        assert outcome.is_error == outcome.text.startswith("error: ")
        outputs.append(outcome.text)
    await workspace.close()
    return outputs


def emulated_outputs(task: DemoTask, calls: list[Call]) -> list[str]:
    workspace = EmulatedWorkspace(task)
    return [workspace.call(call.name, call.arguments) for call in calls]


async def test_outputs_in_demonstrations_are_those_of_the_real_tools(tmp_path: Path) -> None:
    template = shipped_template()
    used: set[str] = set()
    for index in range(TASKS):
        task = make_task("train", 31, index)
        habits = Habits(right=0.3, blind=0.5, verify=1, retry=1, miscopy=0.5, max_turns=8)
        segments = demonstration(random.Random(index), task, template, habits)
        turns = [template.parse(segment.token_ids) for segment in segments if segment.is_agent]
        calls = [Call(call.name, call.arguments) for turn in turns for call in turn.calls]
        used |= {call.name for call in calls}
        assert await real_outputs(written(tmp_path / str(index), task), task, calls) == emulated_outputs(task, calls)
    assert used >= {"read_file", "edit_file", "grep", "run_terminal"}


@pytest.mark.parametrize("set_name", TASK_SETS)
async def test_outputs_of_every_kind_are_those_of_the_real_tools(set_name: TaskSet, tmp_path: Path) -> None:
    task = make_task(set_name, 32, 0)
    path, fix = task.target_path, task.fix
    calls = [
        Call("list_dir", {}),
        Call("grep", {"pattern": f"def {task.function}"}),
        Call("grep", {"pattern": "nosuchtext"}),
        Call("grep", {"pattern": "return"}),
        read(path),
        read("nosuch.py"),
        edit("nosuch.py", "a", "b"),
        edit(path, fix.old, fix.old),
        edit(path, fix.old + " ", fix.new),
        edit(path, fix.new + " and", fix.old),
        edit(path, "e", "f"),
        edit(path, fix.old, f"{fix.old} +"),  # no valid Python any more
        TEST,
        edit(path, f"{fix.old} +", "return nosuchname"),
        TEST,
        edit(path, "return nosuchname", fix.new),
        TEST,
    ]
    assert await real_outputs(written(tmp_path / "w", task), task, calls) == emulated_outputs(task, calls)
