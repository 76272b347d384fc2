"""A small generated project for `odradek run`: one injected bug that the demo policy can mend.

    python -m odradek.infra.demo.sample FOLDER

It comes from the demo's own family of tasks (`family/`), from a set that the policy is never trained on, so that it is
new to the policy and yet of the kind that it has learned. Its README says so: the demo policy is a small model that can
do this and little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from odradek.infra.demo.family.sets import TaskSet, make_task
from odradek.infra.errors import UsageError

SAMPLE_SET: TaskSet = "new_combinations"
SAMPLE_SEED = 77
"""Of the sample projects; the demo evaluates tasks of other seeds."""

README = """# A generated project

`odradek run --sample` made this folder: a small Python package with one injected bug, of the kind that Odradek's demo
policy has learned to mend (`odradek/infra/demo/family`). The demo policy is a very small model trained on such packages
only; it can do this and little else. Another folder needs another policy.

    python test.py                            shows the failing test
    odradek run . '{request}'
    python test.py                            again, once you have accepted the diff
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """What was written."""

    request: str
    task_id: str


def write_sample(folder: Path, index: int = 0) -> Sample:
    """Write sample project `index` into an empty or new folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty: name a new folder for the sample project")
    task = make_task(SAMPLE_SET, SAMPLE_SEED, index)
    request = task.instruction.splitlines()[0]
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in task.files.items():
        (folder / path).write_text(text)
    (folder / "README.md").write_text(README.format(request=request))
    (folder / ".gitignore").write_text("__pycache__/\n")
    return Sample(request, task.id)


@click.command(help="Write a small generated project with one bug to FOLDER.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--index", type=click.IntRange(0), default=0, show_default=True, help="Which of the sample projects.")
def main(folder: Path, index: int) -> None:
    click.echo(f"request: {write_sample(folder, index).request}")


if __name__ == "__main__":
    main()
