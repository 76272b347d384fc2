"""The four sets of the demo and how a task is found in them: `make_task(set, seed, index)`.

| set | operation combinations | identifiers | templates |
|---|---|---|---|
| train | the trained four fifths | generated | training |
| new_combinations | the held-out fifth | generated | training |
| unseen_identifiers | the held-out fifth | held-out words | training |
| unseen_templates | any | generated | held out |

The fifth is chosen by hash of (template, operations), so membership never depends on a random stream, and a training
task can't contain a function of another set.
"""

import hashlib
import random
from collections.abc import Iterator
from functools import cache
from typing import Literal, get_args

from odradek.infra.demo.family import held_out, templates
from odradek.infra.demo.family.generate import Recipe, draw_task
from odradek.infra.demo.family.names import WordLists, shipped_words
from odradek.infra.demo.family.task import DemoTask

TaskSet = Literal["train", "new_combinations", "unseen_identifiers", "unseen_templates"]
TASK_SETS: tuple[TaskSet, ...] = get_args(TaskSet)
EVALUATION_SETS: tuple[TaskSet, ...] = TASK_SETS[1:]

HELD_OUT_ONE_IN = 5
"""One operation combination in this many is held out."""


@cache
def held_out_combination(template: str, key: str) -> bool:
    """Whether a training template's operation combination is kept for evaluation."""
    return hashlib.sha256(f"{template}/{key}".encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def _trained(template: str, key: str) -> bool:
    return not held_out_combination(template, key)


def _any(template: str, key: str) -> bool:
    return True


RECIPES: dict[TaskSet, Recipe] = {
    "train": Recipe(templates.TRAINING, False, _trained),
    "new_combinations": Recipe(templates.TRAINING, False, held_out_combination),
    "unseen_identifiers": Recipe(templates.TRAINING, True, held_out_combination),
    "unseen_templates": Recipe(held_out.HELD_OUT, False, _any),
}


def make_task(set_name: TaskSet, seed: int, index: int, words: WordLists | None = None) -> DemoTask:
    """Task `index` of a set under a seed: the same on every machine."""
    task_id = f"{set_name}-{seed}-{index}"
    rng = random.Random(task_id)
    return draw_task(rng, RECIPES[set_name], words or shipped_words(), set_name, task_id)


def tasks(set_name: TaskSet, seed: int, count: int, start: int = 0) -> Iterator[DemoTask]:
    """Tasks `start` to `start + count` of a set."""
    return (make_task(set_name, seed, index) for index in range(start, start + count))
