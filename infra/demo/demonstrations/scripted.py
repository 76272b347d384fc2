"""A scripted agent that solves demo tasks imperfectly on purpose.

The warm start should know the format, copying, and every habit that pays, each only some of the time: reinforcement
learning then has something to choose from. The rates are those measured to work (`Habits`). The agent reads through
tools like any other; only when it guesses a fix does it look at the task's list of single-token edits, of which the
right one is one. A miscopied quote is shown without being trained, for the recovery that follows it.
"""

import random
from collections.abc import Sequence

import msgspec

from odradek.actors.policy.template import Call, XmlTemplate
from odradek.infra.demo.demonstrations.emulation import TEST_COMMAND, EmulatedWorkspace
from odradek.infra.demo.demonstrations.segments import Segment
from odradek.infra.demo.family.generate import Recipe, draw_function
from odradek.infra.demo.family.mutations import mutations
from odradek.infra.demo.family.names import Names, WordLists, shipped_words
from odradek.infra.demo.family.sets import RECIPES
from odradek.infra.demo.family.task import DemoTask, Edit, FunctionSource

TURNS_OF_AN_ATTEMPT = 2
"""An edit and a test run; an attempt is begun only if they fit before the last turn."""

MAX_ATTEMPTS = 3
"""Fixes tried before the agent gives up."""


class Habits(msgspec.Struct, frozen=True):
    """How often the agent does the sensible thing, as probabilities, and how long it may go on."""

    right: float = 0.5
    """An attempt on the right file is the right fix; otherwise another plausible edit."""
    blind: float = 0.15
    """It edits before reading anything."""
    verify: float = 0.5
    """It runs the tests after an edit."""
    retry: float = 0.5
    """It tries again after a failed test run."""
    parallel: float = 0.35
    """It puts independent calls in one turn (drawn once a session)."""
    miscopy: float = 0.08
    """It first quotes the line with a slip and has to repair the quote."""
    max_turns: int = 6
    """Turns of a session, the last one included: the demo's sessions have the same budget."""


def read(path: str) -> Call:
    return Call("read_file", {"path": path})


def edit(path: str, old: str, new: str) -> Call:
    return Call("edit_file", {"path": path, "old": old, "new": new})


TEST = Call("run_terminal", {"command": TEST_COMMAND})


def demonstration(
    rng: random.Random,
    task: DemoTask,
    template: XmlTemplate,
    habits: Habits | None = None,
    words: WordLists | None = None,
) -> list[Segment]:
    """One session on a task, from its instruction to the turn that ends it."""
    return _Session(rng, task, template, habits or Habits(), words or shipped_words()).run()


class _Session:
    def __init__(
        self, rng: random.Random, task: DemoTask, template: XmlTemplate, habits: Habits, words: WordLists
    ) -> None:
        self._rng = rng
        self._words = words
        self._task = task
        self._template = template
        self._habits = habits
        self._workspace = EmulatedWorkspace(task)
        self._segments = [Segment(template.open(task.instruction), False)]
        self._paths = [path for path in task.files if path != "test.py"]
        self._read: set[str] = set()
        self._turns = 0
        self._parallel = rng.random() < habits.parallel

    def run(self) -> list[Segment]:
        if self._chance(self._habits.blind) and self._edit_blind():
            return self._finish()
        self._look()
        self._repair()
        return self._finish()

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _act(self, *calls: Call, trained: bool = True) -> list[str]:
        results = [self._workspace.call(call.name, call.arguments) for call in calls]
        self._segments.append(Segment(self._template.turn(calls), True, trained))
        self._segments.append(Segment(self._template.results(results), False))
        self._turns += 1
        return results

    def _finish(self) -> list[Segment]:
        self._segments.append(Segment(self._template.turn(done=True), True))
        return self._segments

    def _edit_blind(self) -> bool:
        """An edit of a line never seen; whether the agent then stops."""
        names = Names(self._rng, self._words)
        recipe: Recipe = RECIPES["train"]
        path = self._rng.choice(self._paths)
        _, guess = draw_function(self._rng, names, recipe, path)
        options = _edits(guess)
        if options:
            old_new = self._rng.choice(options)
            calls = [edit(path, old_new.old, old_new.new)]
            self._act(*calls, *([TEST] if self._parallel else []))
        return self._chance(0.6)

    def _look(self) -> None:
        """Find the function: search for it, or read module by module, or read all."""
        way = self._rng.random()
        tests = [TEST] if self._parallel else []
        if way < 0.05:
            self._act(Call("list_dir", {}), *tests)
            self._read_in_turn()
        elif way < 0.37:
            self._act(Call("grep", {"pattern": f"def {self._task.function}"}), *tests)
            self._act(read(self._task.target_path))
            self._read.add(self._task.target_path)
        elif way < 0.6:
            if not self._parallel and self._chance(0.4):
                self._act(TEST)
            self._read_in_turn()
        else:
            self._act(*(read(path) for path in self._paths), *tests)
            self._read.update(self._paths)

    def _read_in_turn(self) -> None:
        order = self._rng.sample(self._paths, len(self._paths))
        for path in order:
            self._act(read(path))
            self._read.add(path)
            if path == self._task.target_path or self._chance(0.5):
                break

    def _repair(self) -> None:
        tried: list[Edit] = []
        for attempt in range(MAX_ATTEMPTS):
            if self._turns + TURNS_OF_AN_ATTEMPT >= self._habits.max_turns:
                return
            wanted = self._choose(tried)
            calls = self._calls_for(wanted, tried[-1] if tried else None)
            spare = self._turns + TURNS_OF_AN_ATTEMPT + 1 < self._habits.max_turns
            if not tried and spare and self._chance(self._habits.miscopy):
                self._miscopy(wanted)
            tried.append(wanted)
            verify = self._chance(self._habits.verify)
            together = verify and (self._parallel or attempt > 0)
            self._act(*calls, *([TEST] if together else []))
            if not verify:
                return
            if not together:
                self._act(TEST)
            if self._workspace.passing or not self._chance(self._habits.retry):
                return

    def _choose(self, tried: Sequence[Edit]) -> Edit:
        """An edit of the original text: the right one as often as the habits say, if the right file was read."""
        task = self._task
        if task.target_path in self._read:
            function = next(f for f in task.functions if f.path == task.target_path and f.name == task.function)
            if task.fix not in tried and self._chance(self._habits.right):
                return task.fix
        else:
            function = self._rng.choice([f for f in task.functions if f.path in self._read])
        options = _edits(function)
        fresh = [option for option in options if option not in tried]
        return self._rng.choice(fresh or options or [task.fix])

    def _calls_for(self, wanted: Edit, last: Edit | None) -> list[Call]:
        """Calls that apply `wanted` to the files as they are: the last try's line is edited again, or put back."""
        if last is None or self._workspace.files[last.path].count(last.new) != 1 or not self._applied(last):
            return [edit(wanted.path, wanted.old, wanted.new)]
        if (last.path, last.old) == (wanted.path, wanted.old):
            return [edit(wanted.path, last.new, wanted.new)]
        return [edit(last.path, last.new, last.old), edit(wanted.path, wanted.old, wanted.new)]

    def _applied(self, last: Edit) -> bool:
        return self._workspace.files[last.path] != self._task.files[last.path]

    def _miscopy(self, wanted: Edit) -> None:
        """Quote the line with a slip: the error shows the line as it is, and the next turn quotes that."""
        text = self._workspace.files[wanted.path]
        function = next(f for f in self._task.functions if f.path == wanted.path and wanted.old in f.source())
        slips = [option.new for option in _edits(function) if option.old == wanted.old and option.new not in text]
        slips = [slip for slip in slips if slip != wanted.new]
        if slips:
            self._act(edit(wanted.path, self._rng.choice(slips), wanted.new), trained=False)


def _edits(function: FunctionSource) -> list[Edit]:
    """Every plausible single-token edit of a function, as line replacements."""
    return [
        Edit(function.path, function.lines[option.line].strip(), option.text.strip())
        for option in mutations(function.lines, function.args)
    ]
