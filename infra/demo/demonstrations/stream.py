"""The warm start's training data, without end and the same on every machine.

`training_stream(seed)` yields examples 0, 1, 2, ...; example i depends on (seed, i, drill share) alone, so a side
process can make every second one (`start`, `step`). Only the set `train` is drawn from. Examples longer than
`MAX_TOKENS` are drawn again, never cut.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from pathlib import Path

from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.infra.demo.demonstrations.drills import drill
from odradek.infra.demo.demonstrations.scripted import Habits, demonstration
from odradek.infra.demo.demonstrations.segments import Example, example
from odradek.infra.demo.family.errors import FamilyError
from odradek.infra.demo.family.sets import make_task

TOKENIZER_PATH = Path(__file__).parent.parent / "warmstart" / "assets" / "tokenizer.json"

MAX_TOKENS = 440
"""Longest example. Longer ones cost quadratic attention for rare three-attempt sessions; far shorter drops retries."""

MAX_REDRAWS = 50
"""Draws for one example under `MAX_TOKENS` (expected: 1.02)."""

DRILL_SCHEDULE: tuple[tuple[float, float], ...] = ((0.15, 0.5), (0.4, 0.3), (1.0, 0.12))
"""(until this fraction of the run, share of drills): copying first, tasks later."""


def drill_share(progress: float) -> float:
    """The share of drills at a point of the run (0 to 1)."""
    return next((share for until, share in DRILL_SCHEDULE if progress < until), DRILL_SCHEDULE[-1][1])


@cache
def shipped_template() -> XmlTemplate:
    """The template over the repository's tokenizer."""
    return XmlTemplate(Tokenizer.from_file(TOKENIZER_PATH))


def template_of(directory: Path) -> XmlTemplate:
    """The template over a policy directory's tokenizer."""
    return XmlTemplate(Tokenizer.from_file(directory / TOKENIZER_PATH.name))


def make_example(
    seed: int, index: int, share: float, template: XmlTemplate | None = None, habits: Habits | None = None
) -> Example:
    """Example `index` of a stream, when drills have this share."""
    template = template or shipped_template()
    rng = random.Random(f"demonstration-{seed}-{index}")
    for redraw in range(MAX_REDRAWS):
        if rng.random() < share:
            segments = drill(rng, template)
        else:
            task = make_task("train", seed, index * MAX_REDRAWS + redraw)
            segments = demonstration(rng, task, template, habits)
        if sum(len(segment.token_ids) for segment in segments) <= MAX_TOKENS:
            return example(segments)
    raise FamilyError(f"no example under {MAX_TOKENS} tokens for seed {seed}, index {index} in {MAX_REDRAWS} draws")


def training_stream(
    seed: int,
    progress: Callable[[], float] = lambda: 1.0,
    start: int = 0,
    step: int = 1,
    template: XmlTemplate | None = None,
) -> Iterator[Example]:
    """Examples `start`, `start + step`, ... for ever. `progress` gives the fraction of the run (0 to 1) that is over,
    asked before each example; it sets the drill share (`DRILL_SCHEDULE`). `template`: of the policy, if not shipped."""
    for index in count(start, step):
        yield make_example(seed, index, drill_share(progress()), template)
