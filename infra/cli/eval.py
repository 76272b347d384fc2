"""`odradek eval`: evaluate one weight version on task sets, by publishing tasks and reading the log. Needs actors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from odradek.infra.cli.context import EXIT_CASE_FAILED, EXIT_ENVIRONMENT, Context, Number, command_options
from odradek.infra.cli.log import Say, opened_log, run, store_trees
from odradek.infra.errors import InfraError, UsageError

if TYPE_CHECKING:
    from odradek.infra.cli.eval_plan import EvalPlan, SetResult
    from odradek.infra.observe.fold import RunFold
    from odradek.streams.events.tasks import TaskPublished
    from odradek.streams.log import EventLog

SETS = ("new_combinations", "unseen_identifiers", "unseen_templates")
"""The demo's held-out sets; that they are those of the family is held by a test."""
SEED = 1000
"""Added to --seed, as the demo does, so that the tasks are those of its evaluations."""
FIRST_GROUP_S = 60.0
"""Seconds until a first group must be opened: after that nobody is admitting tasks."""
LOOK_S = 1.0
"""Seconds between looks at the log."""

EPILOG = """Exit codes: 0 all graded and solved, or the share of them that --require names (0 asks for verdicts only);
1 fewer solved; 2 wrong usage; 3 some tasks not graded (a fault of ours or of the machine, also when every graded one
was solved); 130 interrupted. Started again with the same run name, version and tasks, an evaluation keeps what is
graded and runs the rest."""


@click.command("eval", epilog=EPILOG)
@click.option("--version", type=click.IntRange(0), help="Weight version, sampled wholly under it [the current one].")
@click.option("--task-set", "sets", multiple=True, help="Held-out set: " + ", ".join(SETS) + " [all].")
@click.option("--tasks", type=click.Path(path_type=Path, exists=True), multiple=True, help="Task directory or file.")
@click.option("--count", type=click.IntRange(1), help="Tasks of each set [the demo's sizes].")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the sets' tasks.")
@click.option("--greedy", is_flag=True, help="Temperature 0 instead of 1.")
@click.option("--run", "name", default="eval", show_default=True, help="Another name evaluates afresh.")
@click.option("--require", type=Number(0, 1), default=1.0, show_default=True, help="Share solved for exit code 0.")
@click.option("--timeout", type=Number(1), default=600.0, show_default=True, help="Seconds to wait.")
@command_options
def command(context: Context, version: int | None, name: str, require: float, timeout: float, **asked: Any) -> None:
    """Evaluate a version: publish the tasks, wait for their verdicts, show the share solved with its interval.

    Tasks come from the demo's held-out sets, or from --tasks. A task whose grading failed is reported as not graded,
    never as unsolved. What has been evaluated is refused for training from then on.
    """
    if "~" in name or "#" in name or not name:
        raise UsageError(f"--run {name!r}: a name without ~ and #")

    async def work(tell: Say) -> tuple[int, dict[str, SetResult]]:
        async with opened_log(context, create=True) as event_log:
            return await _evaluate(context, event_log, version, name, timeout, asked, tell)

    used, results = run(context, "evaluating", work)
    code = exit_code(list(results.values()), require)
    lines = [f"version {used}, run {name}", *(_line(one, result) for one, result in results.items())]
    if code == EXIT_CASE_FAILED:
        lines.append(f"fewer than the required {100 * require:g} % solved (--require): exit code {code}")
    context.result({"version": used, "run": name, "sets": results}, "\n".join(lines))
    raise click.exceptions.Exit(code)


def exit_code(results: list[SetResult], require: float) -> int:
    """See `EPILOG`. What was not graded comes first: the share of the rest says too little."""
    if any(one.not_graded or one.unfinished for one in results):
        return EXIT_ENVIRONMENT
    solved, tasks = sum(one.solved for one in results), sum(one.tasks for one in results)
    return 0 if tasks and solved >= require * tasks else EXIT_CASE_FAILED


def _line(name: str, result: SetResult) -> str:
    low, high = result.interval95
    lost = f"; {result.not_graded} not graded" if result.not_graded else ""
    late = f"; {result.unfinished} unfinished" if result.unfinished else ""
    graded = result.solved + result.unsolved
    interval = f"{100 * result.rate:5.1f} % ({100 * low:.0f}-{100 * high:.0f})"
    return f"  {name:20s} {result.solved}/{graded} solved, {interval}{lost}{late}"


async def _evaluate(
    context: Context,
    event_log: EventLog,
    version: int | None,
    name: str,
    timeout: float,
    asked: dict[str, Any],
    tell: Say,
) -> tuple[int, dict[str, SetResult]]:
    from odradek.actors.tasks.sources import load_sources
    from odradek.infra.cli.eval_plan import EvalPlan
    from odradek.infra.observe.follow import RunFollower
    from odradek.streams import topics
    from odradek.streams.envelope import Event, event_id
    from odradek.streams.events.meta import Meta
    from odradek.streams.replay.lineage import versions_of

    follower = RunFollower(event_log)
    fold = await follower.refresh()
    used = fold.current if version is None else version
    if used is None or used not in fold.published:
        known = ", ".join(map(str, sorted(fold.published))) or "none"
        raise UsageError(f"there is no weight version {'yet' if used is None else used}; there is {known}")
    if used in (await versions_of(event_log, context.config.lane.policy)).pruned:
        raise UsageError(f"version {used} was pruned: its weights are no longer kept (odradek weights list)")
    plan = EvalPlan(name, list(tasks_of(context, used, **asked)))
    due = plan.to_publish(fold)
    context.say(f"version {used}: {len(plan.wanted)} tasks, {len(plan.wanted) - len(due)} kept from before")
    await store_trees(context, load_sources(asked["tasks"]).trees if asked["tasks"] else [])
    for task in due:
        event = Event.of(
            task,
            id=event_id("task", task.idempotency_key),
            source="odradek-eval",
            meta=Meta(origin="eval", idempotency_key=task.idempotency_key, time_ms=int(time.time() * 1000)),
        )
        await event_log.append(topics.TASKS.name, task.task_id, event)
    keys = frozenset(task.idempotency_key for task in due)
    fold = await _wait(follower, plan, keys, timeout, tell)
    return used, plan.results(fold)


async def _wait(follower: Any, plan: EvalPlan, due: frozenset[str], timeout: float, tell: Say) -> RunFold:
    """Until everything that was published now is closed. A time-out is no error: its tasks are unfinished."""
    began = time.monotonic()
    while True:
        fold: RunFold = await follower.refresh()
        elapsed = time.monotonic() - began
        opened = sum(group.idempotency_key in due for group in fold.groups.values())
        if (opened == len(due) and not plan.running(fold)) or elapsed > timeout:
            return fold
        if due and not opened and elapsed > FIRST_GROUP_S:
            raise InfraError(
                f"none of {len(due)} published tasks was opened within {FIRST_GROUP_S:.0f} s: is the controller "
                f"running (`odradek status`)? Started again, this evaluation goes on"
            )
        tell(f"{opened} of {len(due)} tasks opened, {plan.running(fold)} under way")
        await asyncio.sleep(LOOK_S)


def tasks_of(
    context: Context,
    version: int,
    *,
    sets: tuple[str, ...],
    tasks: tuple[Path, ...],
    count: int | None,
    seed: int,
    greedy: bool,
) -> Iterator[tuple[str, TaskPublished]]:
    """(set, task) of everything asked for."""
    from odradek.actors.tasks.sources import Options, load_sources
    from odradek.infra.demo.family.sets import make_task
    from odradek.infra.demo.publish import published

    temperature = 0.0 if greedy else 1.0
    unknown = [one for one in sets if one not in SETS]
    if unknown:
        raise UsageError(f"--task-set {unknown[0]!r} is no held-out set; there are {', '.join(SETS)}")
    for task_set in sets or (() if tasks else SETS):
        size = count if count is not None else int(getattr(context.config.demo, task_set))
        for index in range(size):
            made = make_task(task_set, SEED + seed, index)  # type: ignore[arg-type]
            yield (
                task_set,
                published(
                    made,
                    attempts=1,
                    purpose="eval",
                    policy_version=version,
                    temperature=temperature,
                    policy=context.config.lane.policy,
                ),
            )
    options = Options(attempts=1, purpose="eval", policy_version=version, policy=context.config.lane.policy)
    for task in load_sources(tasks, options).tasks if tasks else ():
        task_id = f"{task.task_id}@v{version}t{temperature:g}"
        yield "own tasks", msgspec.structs.replace(task, task_id=task_id, temperature=temperature)
