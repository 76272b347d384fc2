"""Building one task: draw functions, inject a bug that tests can see, split the cases into visible and hidden.

Deterministic from the `random.Random` given. Each loop is bounded; candidate functions run in the bounded subset of
`evaluate` only. A drawn bug is kept if at least two inputs show it, its line and the repaired line can be quoted
unambiguously, and enough inputs are left for the hidden tests.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from odradek.infra.demo.family.errors import TaskNotFound
from odradek.infra.demo.family.evaluate import Outcome, load_functions, outcome
from odradek.infra.demo.family.mutations import mutations
from odradek.infra.demo.family.names import Names, WordLists
from odradek.infra.demo.family.task import Case, DemoTask, Edit, FunctionSource, Value, VisibleCase, test_script
from odradek.infra.demo.family.templates import Draft, Template

HIDDEN_CASES = 24
"""Hidden cases aimed at; templates with few distinct inputs give fewer, never under `MIN_HIDDEN_CASES`."""

MIN_HIDDEN_CASES = 12
"""Fewer would let wrong fixes through by luck."""

VISIBLE_CASES = 3
"""Cases of the target function in `test.py`. More tells the agent more, at tokens only if it reads the file."""

INPUT_DRAWS = 60
"""Draws for distinct inputs; small arguments repeat often."""

MAX_FUNCTION_DRAWS = 2000
"""Draws until a function is on the wanted side of the combination split (expected: 5 for the held-out fifth)."""

MAX_TASK_DRAWS = 200
"""Draws until a package takes a visible bug (expected: under 2)."""

Admit = Callable[[str, str], bool]
"""Whether a set may use this operation combination of this template: (template name, key)."""


class Recipe(msgspec.Struct, frozen=True):
    """What one set draws from."""

    templates: tuple[Template, ...]
    held_out_words: bool
    admit: Admit


def draw_function(rng: random.Random, names: Names, recipe: Recipe, path: str) -> tuple[str, FunctionSource]:
    """A named function of the set, and its template's name."""
    mark = names.mark()
    for _ in range(MAX_FUNCTION_DRAWS):
        template = rng.choice(recipe.templates)
        names.rewind(mark)
        draft = template(rng, names)
        if recipe.admit(template.__name__, draft.key):
            name = names.fresh("function")
            names.rewind(mark, keep=name)
            return template.__name__, _named(draft, name, path)
    raise TaskNotFound(f"no admissible function in {MAX_FUNCTION_DRAWS} draws")


def _named(draft: Draft, name: str, path: str) -> FunctionSource:
    return FunctionSource(path, name, draft.doc, list(draft.args), list(draft.lines))


def draw_inputs(rng: random.Random, args: Sequence[tuple[str, str]], draws: int = INPUT_DRAWS) -> list[list[Value]]:
    """Distinct small inputs, in drawing order."""
    found: dict[str, list[Value]] = {}
    for _ in range(draws):
        row = [_draw_value(rng, kind) for _, kind in args]
        if len(row) > 1 and args[1][1] == "affix" and isinstance(row[0], str) and rng.random() < 0.6:
            row[1] = row[0][0] if rng.random() < 0.5 else row[0][-1]
        found.setdefault(repr(row), row)
        if len(found) == HIDDEN_CASES + VISIBLE_CASES:
            break
    return list(found.values())


def _draw_value(rng: random.Random, kind: str) -> Value:
    if kind == "int":
        return rng.randint(1, 6)
    if kind == "list":
        return [rng.randint(1, 6) for _ in range(rng.randint(3, 4))]
    if kind == "text":
        return "".join(rng.choice("abAB") for _ in range(3))
    return rng.choice("abAB")


class _Bug(msgspec.Struct, frozen=True):
    function: FunctionSource
    inputs: list[list[Value]]
    wanted: list[Outcome]
    failing: list[int]
    fixed_line: str
    buggy_line: str


def draw_task(rng: random.Random, recipe: Recipe, words: WordLists, set_name: str, task_id: str) -> DemoTask:
    """One task of a set. Raises `TaskNotFound` or `NamesExhausted`, never loops for ever."""
    for _ in range(MAX_TASK_DRAWS):
        names = Names(rng, words, recipe.held_out_words)
        paths = [f"{names.fresh('local')}.py" for _ in range(rng.choice((1, 1, 2)))]
        drawn = [draw_function(rng, names, recipe, path) for path in paths for _ in range(rng.choice((1, 1, 2)))]
        template, target = rng.choice(drawn)
        bug = _inject(rng, target)
        if bug is None:
            continue
        functions = [bug.function if function is target else function for _, function in drawn]
        task = _assemble(rng, bug, functions, paths, (set_name, task_id, template))
        if task is not None:
            return task
    raise TaskNotFound(f"no task for {task_id} in {MAX_TASK_DRAWS} draws")


def _inject(rng: random.Random, target: FunctionSource) -> _Bug | None:
    """The first mutation, in random order, that at least two inputs show."""
    candidates = mutations(target.lines, target.args)
    if len(candidates) < 2:
        return None
    inputs = draw_inputs(rng, target.args)
    right = load_functions(target.source())[target.name]
    scored = [(row, outcome(right, row)) for row in inputs]
    scored = [(row, result) for row, result in scored if result[1] is not None]  # drop inputs that raise
    if len(scored) < MIN_HIDDEN_CASES + VISIBLE_CASES:
        return None
    rng.shuffle(candidates)
    for candidate in candidates:
        lines = [*target.lines[: candidate.line], candidate.text, *target.lines[candidate.line + 1 :]]
        buggy = msgspec.structs.replace(target, lines=lines)
        wrong = load_functions(buggy.source())[target.name]
        failing = [at for at, (row, result) in enumerate(scored) if outcome(wrong, row)[0] != result[0]]
        if len(failing) >= 2:
            rows, wanted = [row for row, _ in scored], [result for _, result in scored]
            right_line = target.lines[candidate.line].strip()
            return _Bug(buggy, rows, wanted, failing, right_line, candidate.text.strip())
    return None


def _assemble(
    rng: random.Random, bug: _Bug, functions: list[FunctionSource], paths: list[str], labels: tuple[str, str, str]
) -> DemoTask | None:
    target = bug.function
    files = {path: "\n".join(f.source() for f in functions if f.path == path) for path in paths}
    fixed = files[target.path].replace(bug.buggy_line, bug.fixed_line)
    if files[target.path].count(bug.buggy_line) != 1 or fixed.count(bug.fixed_line) != 1:
        return None  # the line could not be quoted without ambiguity
    first = bug.failing[0]
    shown = [first, *[at for at in range(len(bug.inputs)) if at != first][: VISIBLE_CASES - 1]]
    module = target.path.removesuffix(".py")
    visible = [VisibleCase(module, target.name, bug.inputs[at], bug.wanted[at][1]) for at in shown]
    for other in functions:
        if other is not target:
            visible += _passing_cases(rng, other)
    hidden = _hidden_cases(bug, set(shown))
    if len(hidden) < MIN_HIDDEN_CASES or not any(case.fails for case in hidden):
        return None
    set_name, task_id, template = labels
    return DemoTask(
        id=task_id,
        set=set_name,
        template=template,
        instruction=f"fix test_{target.name}\n{' '.join(paths)}",
        files={**files, "test.py": test_script(visible)},
        target_path=target.path,
        function=target.name,
        visible=visible,
        hidden=hidden,
        fix=Edit(target.path, bug.buggy_line, bug.fixed_line),
        functions=functions,
    )


def _hidden_cases(bug: _Bug, shown: set[int]) -> list[Case]:
    failing = set(bug.failing)
    return [
        Case(f"test_{bug.function.name}[{at}]", bug.inputs[at], bug.wanted[at][1], at in failing)
        for at in range(len(bug.inputs))
        if at not in shown
    ]


def _passing_cases(rng: random.Random, function: FunctionSource) -> list[VisibleCase]:
    run: Callable[..., Any] = load_functions(function.source())[function.name]
    scored = [(row, outcome(run, row)) for row in draw_inputs(rng, function.args, draws=4)]
    module = function.path.removesuffix(".py")
    return [VisibleCase(module, function.name, row, value) for row, (_, value) in scored if value is not None][:1]
