"""The demo's task family: solvable, honest about held-out sets, bounded, and the same everywhere."""

import random
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from odradek.infra.demo.family.errors import NamesExhausted, NotBounded
from odradek.infra.demo.family.evaluate import load_functions, outcome
from odradek.infra.demo.family.generate import MIN_HIDDEN_CASES
from odradek.infra.demo.family.mutations import mutations
from odradek.infra.demo.family.names import HELD_OUT_WORDS, Names, WordLists, generated_word, shipped_words
from odradek.infra.demo.family.sets import (
    TASK_SETS,
    TaskSet,
    held_out_combination,
    make_task,
    tasks,
)
from odradek.infra.demo.family.task import DemoTask
from odradek.infra.demo.family.templates import TRAINING

HELD_OUT = set(HELD_OUT_WORDS) | {word + "s" for word in HELD_OUT_WORDS}


def fixed_files(task: DemoTask) -> dict[str, str]:
    text = task.files[task.target_path]
    assert text.count(task.fix.old) == 1
    return {**task.files, task.target_path: text.replace(task.fix.old, task.fix.new)}


def hidden_results(task: DemoTask, files: dict[str, str]) -> dict[str, bool]:
    function = load_functions(files[task.target_path])[task.function]
    return {case.id: outcome(function, case.args)[0] == repr(case.want) for case in task.hidden}


def words_of(task: DemoTask) -> set[str]:
    return set(re.findall("[a-z]+", " ".join([*task.files, *task.files.values()])))


@pytest.mark.parametrize("set_name", TASK_SETS)
def test_hidden_tests_fail_before_the_fix_exactly_where_they_say_and_pass_after(set_name: TaskSet) -> None:
    for task in tasks(set_name, seed=11, count=60):
        before = hidden_results(task, task.files)
        assert {name for name, passed in before.items() if not passed} == set(task.fail_to_pass)
        assert task.fail_to_pass
        assert len(task.hidden) >= MIN_HIDDEN_CASES
        assert all(hidden_results(task, fixed_files(task)).values())


def test_hidden_inputs_are_not_the_visible_ones_and_not_in_the_workspace() -> None:
    for task in tasks("train", seed=12, count=60):
        visible = [case.args for case in task.visible if case.function == task.function]
        assert not [case for case in task.hidden if case.args in visible]
        assert set(task.files) == {*(f.path for f in task.functions), "test.py"}


@pytest.mark.parametrize("set_name", TASK_SETS)
def test_the_visible_script_fails_on_the_bug_and_passes_on_the_fix(set_name: TaskSet, tmp_path: Path) -> None:
    for task in tasks(set_name, seed=13, count=3):
        folder = tmp_path / task.id
        folder.mkdir()
        runs = []
        for files in (task.files, fixed_files(task)):
            for path, text in files.items():
                (folder / path).write_text(text)
            command = [sys.executable, "-S", "-B", "test.py"]
            runs.append(subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60))
        assert (runs[0].returncode, runs[1].returncode) == (1, 0)
        assert re.fullmatch(rf"test_{task.function}: got .+, want .+ for .+\n1 failed\n", runs[0].stdout)
        assert runs[1].stdout == f"{len(task.functions)} passed\n"


def test_the_bug_is_one_token() -> None:
    for task in tasks("train", seed=14, count=100):
        target = next(f for f in task.functions if f.name == task.function)
        repaired = [edit.text.strip() for edit in mutations(target.lines, target.args)]
        line = next(line for line in target.lines if line.strip() == task.fix.old)
        assert line != task.fix.new
        assert task.fix.new in repaired or " not in " in task.fix.old + task.fix.new


def test_no_function_of_a_training_task_is_held_out() -> None:
    names = {template.__name__ for template in TRAINING}
    for task in tasks("train", seed=15, count=200):
        assert task.template in names
        assert not words_of(task) & HELD_OUT


def test_held_out_sets_hold_what_they_say() -> None:
    names = {template.__name__ for template in TRAINING}
    for task in tasks("new_combinations", seed=16, count=60):
        assert task.template in names
        assert not words_of(task) & HELD_OUT
    for task in tasks("unseen_identifiers", seed=16, count=60):
        assert task.template in names
        assert set(task.function.split("_")) <= HELD_OUT
    for task in tasks("unseen_templates", seed=16, count=60):
        assert task.template not in names
        assert not words_of(task) & HELD_OUT


def test_one_fifth_of_the_combinations_is_held_out() -> None:
    rng = random.Random(0)
    drawn = [
        (template.__name__, template(rng, Names(rng, shipped_words())).key) for template in TRAINING for _ in range(200)
    ]
    share = sum(held_out_combination(*one) for one in set(drawn)) / len(set(drawn))
    assert 0.1 < share < 0.3


def test_training_and_new_combinations_never_share_a_combination() -> None:
    """The docstring names the operations, so equal docstrings up to names would be equal combinations."""
    seen = {(t.template, _shape(t)) for t in tasks("train", seed=17, count=400)}
    assert not [t.id for t in tasks("new_combinations", seed=17, count=100) if (t.template, _shape(t)) in seen]


def _shape(task: DemoTask) -> str:
    function = next(f for f in task.functions if f.name == task.function)
    return " ".join(word for word in re.findall(r"[A-Za-z0-9]+", function.doc) if word not in dict(function.args))


def test_a_task_is_the_same_wherever_it_is_made() -> None:
    code = (
        "from odradek.infra.demo.family.sets import make_task, TASK_SETS\n"
        "import hashlib, msgspec\n"
        "made = [make_task(s, 5, i) for s in TASK_SETS for i in (0, 9)]\n"
        "print(*(hashlib.sha256(msgspec.json.encode(task)).hexdigest() for task in made))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0].split())) == 8


def test_an_empty_name_pool_is_an_error_not_a_loop() -> None:
    with pytest.raises(NamesExhausted, match="no usable word"):
        generated_word(_Fixed(), WordLists(["if"], []))  # every draw gives a reserved word
    names = Names(random.Random(0), WordLists(["pear"], []), held_out=True)
    with pytest.raises(NamesExhausted, match="no unused list name"):
        for _ in range(len(HELD_OUT_WORDS) + 1):
            names.fresh("list")


class _Fixed(random.Random):
    """Always draws the word list's first word."""

    def random(self) -> float:
        return 0.7

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[0]


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n        pass",
        "for v in xs:\n        xs += xs\n    return xs",
        "ys = xs\n    for v in xs:\n        ys += xs\n    return ys",
        "for v in xs:\n        v += xs",
        "return f(xs)",
        "return xs ** 9",
        "return xs << 99",
        "return __import__('os')",
        "return xs.append(1)",
        "return (lambda: 1)()",
        "return [a for a in xs for b in xs for c in xs]",
        "return max(xs, key=f)",
        "sum = f\n    return sum(xs)",
        "return [sum(xs) for sum in [xs]]",
        "return f.upper(xs).join(xs)",
    ],
)
def test_a_source_that_could_run_for_ever_is_not_run(body: str) -> None:
    with pytest.raises(NotBounded):
        load_functions(f"def f(xs):\n    {body}\n")


def test_a_name_may_be_an_argument_here_and_a_function_there() -> None:
    """With few words, one function's argument is another's name; the module is as bounded as before."""
    functions = load_functions("def f(g):\n    return g + 1\n\ndef g(f):\n    return f - 1\n")
    assert (outcome(functions["f"], [1]), outcome(functions["g"], [1])) == (("2", 2), ("0", 0))


@pytest.mark.parametrize(
    "source", ["def sum(xs):\n    return sum(xs)\n", "@any\ndef f(xs):\n    return xs\n", "x = 1\n"]
)
def test_a_module_of_anything_else_is_not_run(source: str) -> None:
    with pytest.raises(NotBounded):
        load_functions(source)


def test_a_huge_range_is_an_error_of_the_function() -> None:
    function = load_functions("def f(a):\n    return sum(range(0, a))\n")["f"]
    assert outcome(function, [10**12]) == ("ValueError", None)


@pytest.mark.parametrize("set_name", TASK_SETS)
def test_every_mutation_of_every_function_stays_bounded(set_name: TaskSet) -> None:
    for task in tasks(set_name, seed=18, count=120):
        for function in task.functions:
            for edit in mutations(function.lines, function.args):
                lines = [*function.lines[: edit.line], edit.text, *function.lines[edit.line + 1 :]]
                source = msgspec.structs.replace(function, lines=lines).source()
                assert function.name in load_functions(source)
        modules = [text for path, text in task.files.items() if path != "test.py"]
        assert sum(len(load_functions(text)) for text in modules) == len(task.functions)


def test_module_names_are_importable_as_workspace_modules() -> None:
    for task in tasks("train", seed=19, count=200):
        modules = {path.removesuffix(".py") for path in task.files}
        assert not (modules - {"test"}) & sys.stdlib_module_names


def test_make_task_answers_for_any_index() -> None:
    assert make_task("train", 0, 10**9).id == "train-0-1000000000"
