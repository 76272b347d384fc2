"""An evaluation as a pure fold: which tasks to publish now, and how each stands. `odradek eval` runs it.

A run has a name, and each of its tasks a key made of it, so that the log itself remembers what was graded: the same run
started again keeps every result, publishes again only what a fault of ours left without one (under a fresh key), and
waits for what is still under way. Counts always add up to the number of tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from odradek.infra.demo.intervals import wilson
from odradek.infra.observe.fold import RunFold
from odradek.streams.events.groups import GroupOpened
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.tasks import TaskPublished

AGAIN = "~"
"""Between a key and the number of the try, from the second on."""


class Standing(StrEnum):
    """How one task of the run stands."""

    NEW = "new"
    """Not opened yet."""
    RUNNING = "running"
    SOLVED = "solved"
    UNSOLVED = "unsolved"
    LOST = "lost"
    """Every group of it was closed without a verdict: a fault of ours."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """One set of tasks. tasks = solved + unsolved + not_graded + unfinished."""

    tasks: int
    solved: int
    unsolved: int
    not_graded: int
    """Lost to a fault of ours; never counted as unsolved."""
    unfinished: int
    """Without a verdict when the wait was over."""
    rate: float
    """Of those with a verdict."""
    interval95: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One task of the run."""

    run: str
    key: str
    task_set: str
    task: TaskPublished

    def event(self, retry: int) -> TaskPublished:
        """The task as published for its `retry`-th time: another key, and so another task to the controller."""
        suffix = f"{AGAIN}{retry}" if retry else ""
        return msgspec.structs.replace(
            self.task, idempotency_key=f"{self.key}{suffix}", task_id=f"{self.task.task_id}/{self.run}{suffix}"
        )


class EvalPlan:
    """See the module."""

    def __init__(self, run: str, tasks: Sequence[tuple[str, TaskPublished]]) -> None:
        self.wanted = [Wanted(run, f"eval/{run}/{task.task_id}", task_set, task) for task_set, task in tasks]

    def groups_of(self, fold: RunFold) -> Mapping[str, list[GroupOpened]]:
        """By key the groups that were opened for it, its retries included, in opening order."""
        found: dict[str, list[GroupOpened]] = {}
        for group in fold.groups.values():
            found.setdefault(group.idempotency_key.partition(AGAIN)[0], []).append(group)
        return found

    def standings(self, fold: RunFold) -> dict[str, Standing]:
        """By key how each task stands."""
        groups = self.groups_of(fold)
        verdicts: dict[str, RewardAssigned] = {}
        for verdict in fold.verdicts.values():
            verdicts.setdefault(verdict.group_id, verdict)
        return {one.key: _standing(groups.get(one.key, []), verdicts, fold.open_groups) for one in self.wanted}

    def to_publish(self, fold: RunFold) -> list[TaskPublished]:
        """What a start of the run publishes: tasks that no group was opened for (the same key twice is one task, so
        one that only waits is not doubled), and those lost to a fault, each as its next try."""
        groups, standings = self.groups_of(fold), self.standings(fold)
        due = {Standing.NEW, Standing.LOST}
        return [one.event(len(groups.get(one.key, []))) for one in self.wanted if standings[one.key] in due]

    def running(self, fold: RunFold) -> int:
        """How many tasks are under way."""
        return list(self.standings(fold).values()).count(Standing.RUNNING)

    def results(self, fold: RunFold) -> dict[str, SetResult]:
        """By set, in the order of the tasks."""
        standings = self.standings(fold)
        by_set: dict[str, list[Standing]] = {}
        for one in self.wanted:
            by_set.setdefault(one.task_set, []).append(standings[one.key])
        return {name: _result(found) for name, found in by_set.items()}


def _standing(
    groups: Sequence[GroupOpened], verdicts: Mapping[str, RewardAssigned], open_groups: Collection[str]
) -> Standing:
    """The first verdict of any try counts, a replaced member's included; a later try never replaces it."""
    for group in groups:
        verdict = verdicts.get(group.group_id)
        if verdict is not None:
            return Standing.SOLVED if verdict.components.get("solved", 0.0) >= 1.0 else Standing.UNSOLVED
    if not groups:
        return Standing.NEW
    return Standing.RUNNING if any(group.group_id in open_groups for group in groups) else Standing.LOST


def _result(standings: Sequence[Standing]) -> SetResult:
    solved, unsolved = standings.count(Standing.SOLVED), standings.count(Standing.UNSOLVED)
    graded = solved + unsolved
    return SetResult(
        tasks=len(standings),
        solved=solved,
        unsolved=unsolved,
        not_graded=standings.count(Standing.LOST),
        unfinished=standings.count(Standing.NEW) + standings.count(Standing.RUNNING),
        rate=solved / graded if graded else 0.0,
        interval95=wilson(solved, graded),
    )
