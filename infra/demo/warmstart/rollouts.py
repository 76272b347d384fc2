"""Whole sessions in one process: our engine samples, the demonstrations' emulated tools answer. No Kafka, no sandbox.

For measuring a policy quickly and for trying objectives; the demo itself goes through session actors. The rules of a
session (turn limit, context, how it ends) and the budget are those of `actors.session`; hidden cases are judged by the
bounded evaluator, so an edit that leaves its subset of Python counts as unsolved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.policy.template import ParsedCall, XmlTemplate
from odradek.infra.demo.demonstrations.emulation import TEST_COMMAND, EmulatedWorkspace
from odradek.infra.demo.family.errors import NotBounded
from odradek.infra.demo.family.evaluate import load_functions, outcome
from odradek.infra.demo.family.task import DemoTask
from odradek.streams.events.tasks import Budget

LEAST_COMPLETION: Final = 4
"""Context left for a turn; below this the session ends."""

REQUEST_SECONDS: Final = 3600.0
"""Deadline of a request: a whole set is queued at once, so the last one waits for nearly all others."""


@dataclass
class Rollout:
    """One session: its tokens with what was sampled, and how the agent behaved."""

    task: DemoTask
    seed: int
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    workspace: EmulatedWorkspace
    turns: int = 0
    errors: int = 0
    trace: list[str] = field(default_factory=list)
    """Names of calls in order, tests as `test`."""
    parallel: bool = False
    """Some turn had two or more calls."""
    finished: bool = False
    solved: bool = False

    @property
    def read_before_edit(self) -> bool | None:
        """Whether anything was read before the first edit; None without an edit."""
        if "edit_file" not in self.trace:
            return None
        return "read_file" in self.trace[: self.trace.index("edit_file")]

    @property
    def tested_after_edit(self) -> bool | None:
        """Whether the tests ran after the last edit; None without an edit."""
        if "edit_file" not in self.trace:
            return None
        return "test" in self.trace[::-1][: self.trace[::-1].index("edit_file")]


def run_sessions(
    engine: Engine,
    template: XmlTemplate,
    tasks: Iterable[tuple[DemoTask, int]],
    temperature: float = 1.0,
    budget: Budget | None = None,
) -> list[Rollout]:
    """One session for each (task, seed), in that order; the engine has weights and nothing else to do."""
    budget = budget or Budget()
    rollouts = [_opened(template, task, seed) for task, seed in tasks]
    for number, rollout in enumerate(rollouts):
        engine.add(_request(number, rollout, template, temperature, budget))
    while not engine.idle:
        out = engine.step()
        for _, error in out.failed:
            raise error
        for result in out.finished:
            number = int(result.session_id)
            rollout = rollouts[number]
            _take_turn(rollout, result, template, budget)
            if rollout.finished:
                rollout.solved = solved(rollout)
                engine.forget(result.session_id)
            else:
                engine.add(_request(number, rollout, template, temperature, budget))
    return rollouts


def _opened(template: XmlTemplate, task: DemoTask, seed: int) -> Rollout:
    prompt = template.open(task.instruction)
    n = len(prompt)
    return Rollout(task, seed, prompt, [False] * n, [0.0] * n, EmulatedWorkspace(task))


def _request(number: int, rollout: Rollout, template: XmlTemplate, temperature: float, budget: Budget) -> SampleRequest:
    return SampleRequest(
        request_id=f"{number}-{rollout.turns}",
        session_id=str(number),
        epoch=0,
        prompt_tokens=list(rollout.tokens),
        max_new_tokens=min(budget.max_turn_tokens, budget.max_context_tokens - len(rollout.tokens)),
        stop_ids=template.stop_ids,
        temperature=temperature,
        seed=rollout.seed,
        deadline=time.monotonic() + REQUEST_SECONDS,
    )


def _take_turn(rollout: Rollout, result: SampleResult, template: XmlTemplate, budget: Budget) -> None:
    rollout.tokens += result.tokens
    rollout.sampled += [True] * len(result.tokens)
    rollout.logprobs += result.logprobs
    rollout.turns += 1
    turn = template.parse(result.tokens)
    if result.finish_reason == "length":
        rollout.finished = True
        return
    rollout.parallel |= len(turn.calls) > 1
    results = [_call(rollout, call) for call in turn.calls]
    rollout.errors += sum(text.startswith("error: ") for text in results)
    added = template.results(results)
    over = len(rollout.tokens) + len(added) + LEAST_COMPLETION > budget.max_context_tokens
    if turn.done or not turn.calls or over or rollout.turns >= budget.max_turns:
        rollout.finished = True
        return
    rollout.tokens += added
    rollout.sampled += [False] * len(added)
    rollout.logprobs += [0.0] * len(added)


def _call(rollout: Rollout, call: ParsedCall) -> str:
    test = call.name == "run_terminal" and call.arguments == {"command": TEST_COMMAND}
    rollout.trace.append("test" if test else call.name)
    if call.error is not None:
        return f"error: {call.error}"
    try:
        return rollout.workspace.call(call.name, call.arguments)
    except Exception as error:  # whatever the policy makes up is an unsuccessful call of its own
        return f"error: {type(error).__name__}"


def solved(rollout: Rollout) -> bool:
    """Whether every hidden case gives the wanted value."""
    task = rollout.task
    try:
        function = load_functions(rollout.workspace.files[task.target_path])[task.function]
    except (SyntaxError, NotBounded, KeyError):
        return False
    return all(outcome(function, case.args)[0] == repr(case.want) for case in task.hidden)


def rate(values: Sequence[bool | None]) -> float:
    """Share of True among those that are not None; 0 when there is none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0
