"""`odradek eval`: what a run publishes, what it keeps, how it counts, and what it exits with."""

from __future__ import annotations

import pytest
from support.cli import Cli

from odradek.infra.cli.eval import SETS, exit_code
from odradek.infra.cli.eval_plan import EvalPlan, SetResult
from odradek.infra.demo.family.sets import EVALUATION_SETS, make_task
from odradek.infra.demo.publish import published
from odradek.infra.observe.fold import RunFold
from odradek.streams.events.groups import GroupDiscarded, GroupEvent, GroupOpened, GroupSealed
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.tasks import TaskPublished

TASKS = [published(make_task("train", 5, i), attempts=1, purpose="eval", policy_version=2) for i in range(6)]


class Log:
    """A run's fold, fed as the log would."""

    def __init__(self) -> None:
        self.fold = RunFold()
        self._offset = 0

    def apply(self, body: GroupEvent | RewardAssigned) -> None:
        self._offset += 1
        ref = RecordRef("groups.v1", 0, self._offset)
        self.fold.apply(ref, str(self._offset), Meta(origin="eval"), body, 0)

    def opened(self, task: TaskPublished) -> str:
        group = f"group of {task.idempotency_key}"
        self.apply(
            GroupOpened(
                group_id=group,
                lane="eval-1",
                ordinal=0,
                task=RecordRef("tasks.v1", 0, self._offset),
                task_id=task.task_id,
                task_digest="",
                purpose="eval",
                policy="demo",
                sessions=[f"member of {group}"],
                version=2,
                deadline_ms=0,
                idempotency_key=task.idempotency_key,
            )
        )
        return group

    def graded(self, task: TaskPublished, solved: float, session: str = "") -> None:
        group = self.opened(task)
        self.apply(
            RewardAssigned(
                session_id=session or f"member of {group}",
                group_id=group,
                partition=0,
                first_offset=0,
                last_offset=1,
                grader="g",
                grader_version="1",
                components={"solved": solved},
                total=solved,
            )
        )
        self.apply(GroupSealed(group_id=group, lane="eval-1", reason="complete", members=[]))

    def lost(self, task: TaskPublished) -> None:
        group = self.opened(task)
        self.apply(GroupDiscarded(group_id=group, lane="eval-1", reason="infrastructure", detail="sandbox"))


def plan() -> EvalPlan:
    return EvalPlan("nightly", [("new", task) for task in TASKS])


def test_case_openhands_586_a_resumed_run_keeps_results_and_runs_the_rest_again() -> None:
    """OpenHands/benchmarks #586: three graded, two sandbox errors, one unfinished; the resume runs three."""
    log = Log()
    first = plan().to_publish(log.fold)
    assert len(first) == 6
    for task, solved in zip(first[:3], (1.0, 0.0, 1.0), strict=True):
        log.graded(task, solved)
    for task in first[3:5]:
        log.lost(task)
    before = plan().results(log.fold)["new"]
    assert (before.solved, before.unsolved, before.not_graded, before.unfinished) == (2, 1, 2, 1)
    again = plan().to_publish(log.fold)
    assert [task.idempotency_key for task in again] == [
        f"{first[3].idempotency_key}~1",
        f"{first[4].idempotency_key}~1",
        first[5].idempotency_key,
    ]
    assert len({task.task_id for task in (*first, *again)}) == 8
    for task in again:
        log.graded(task, 1.0)
    after = plan().results(log.fold)["new"]
    assert (after.tasks, after.solved, after.unsolved, after.not_graded, after.unfinished) == (6, 5, 1, 0, 0)
    assert plan().to_publish(log.fold) == []


def test_what_is_under_way_is_waited_for_and_not_doubled() -> None:
    log = Log()
    first = plan().to_publish(log.fold)
    log.opened(first[0])
    assert first[0] not in plan().to_publish(log.fold) and plan().running(log.fold) == 1
    log.lost(first[1])
    (again, *_) = plan().to_publish(log.fold)
    log.lost(again)
    (third, *_) = plan().to_publish(log.fold)
    assert third.idempotency_key == f"{first[1].idempotency_key}~2"


def test_the_first_verdict_counts_a_replaced_members_included() -> None:
    log = Log()
    first = plan().to_publish(log.fold)[0]
    log.graded(first, 1.0, session="a fresh attempt")
    assert plan().results(log.fold)["new"].solved == 1


def test_another_run_name_version_or_temperature_is_another_evaluation() -> None:
    log = Log()
    for task in plan().to_publish(log.fold):
        log.graded(task, 1.0)
    assert len(EvalPlan("other", [("new", task) for task in TASKS]).to_publish(log.fold)) == 6
    greedy = published(make_task("train", 5, 0), attempts=1, purpose="eval", policy_version=2, temperature=0.0)
    newer = published(make_task("train", 5, 0), attempts=1, purpose="eval", policy_version=3)
    assert len(EvalPlan("nightly", [("new", greedy), ("new", newer)]).to_publish(log.fold)) == 2


def result(solved: int, unsolved: int, not_graded: int = 0, unfinished: int = 0) -> SetResult:
    tasks = solved + unsolved + not_graded + unfinished
    return SetResult(
        tasks=tasks,
        solved=solved,
        unsolved=unsolved,
        not_graded=not_graded,
        unfinished=unfinished,
        rate=0.0,
        interval95=(0.0, 1.0),
    )


@pytest.mark.parametrize(
    ("results", "require", "code"),
    [
        ([result(2, 0)], 1.0, 0),
        ([result(1, 1)], 1.0, 1),
        ([result(1, 0, not_graded=1)], 1.0, 3),
        ([result(1, 0, unfinished=1)], 0.0, 3),
        ([result(0, 1, not_graded=1)], 1.0, 3),
        ([result(1, 1)], 0.5, 0),
        ([result(0, 2), result(2, 0)], 0.5, 0),
        ([result(0, 2)], 0.0, 0),
        ([], 0.0, 1),
    ],
)
def test_case_adk_6740_the_exit_code_is_0_only_if_what_is_required_passed(
    results: list[SetResult], require: float, code: int
) -> None:
    """google/adk-python PR 6740, benchflow PR 755: exit 0 though cases failed or errored."""
    assert exit_code(results, require) == code


def test_the_sets_offered_are_the_familys_held_out_ones() -> None:
    assert SETS == EVALUATION_SETS


def test_an_unknown_flag_or_set_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(capsys)
    assert cli("eval", "--verson", 1).code == 2
    assert cli("eval", "--require", 2).code == 2
    assert cli("eval", "--run", "a~1").code == 2
