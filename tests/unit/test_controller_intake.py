"""What repetitions and cancellations of a task lead to, now and after a restart (actors/controller/intake.py)."""

from __future__ import annotations

from typing import Any

import pytest

from odradek.actors.controller.core import Controller
from odradek.streams.events.groups import GroupDiscarded, GroupEvent, GroupOpened, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import Budget, HiddenCase, HiddenTests, TaskCancelled, TaskEvent, TaskPublished
from odradek.streams.events.weights import VersionPublished

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=10**6)
TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])
OPENED = "opened"


def task(name: str = "t", **fields: Any) -> TaskPublished:
    return TaskPublished(
        **{"task_id": name, "instruction": "fix", "files": {"m.py": ""}, "tests": TESTS, "attempts": 2, **fields}
    )


class World:
    """tasks.v1 and groups.v1 as lists, and a controller that can be killed at any time."""

    def __init__(self) -> None:
        self.tasks: list[tuple[RecordRef, TaskEvent]] = []
        self.groups: list[GroupEvent] = []
        self.restart()

    def restart(self) -> None:
        """As `ControllerActor._recover` and `_follow` do."""
        self.core = Controller(LANE)
        low = [0, 0]
        for offset, decided in enumerate(self.groups):
            self.core.apply_group(offset, decided)
            if isinstance(decided, GroupOpened):
                known = [*decided.tasks_low, 0, 0]
                low = [max(pair) for pair in zip(low, known, strict=False)]
        self.core.recovered()
        self.core.on_weights(VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="0"))
        for ref, event in self.tasks:
            if ref.offset >= low[ref.partition]:
                self.core.on_task(ref, event)

    def put(self, event: TaskEvent, partition: int = 0) -> RecordRef:
        ref = RecordRef("tasks.v1", partition, sum(ref.partition == partition for ref, _ in self.tasks))
        self.tasks.append((ref, event))
        self.core.on_task(ref, event)
        return ref

    def decide(self, slots: int = 100) -> list[GroupEvent]:
        """Decided, and committed."""
        decided = self.core.decide(0, slots, [0])
        for event in decided:
            self.core.apply_group(len(self.groups), event)
            self.groups.append(event)
        return decided

    def outcomes(self) -> dict[RecordRef, list[str]]:
        """By task record everything that groups.v1 says of it."""
        found: dict[RecordRef, list[str]] = {}
        for event in self.groups:
            if isinstance(event, GroupOpened):
                found.setdefault(event.task, []).append(OPENED)
            elif isinstance(event, GroupDiscarded) and event.task is not None:
                found.setdefault(event.task, []).append(event.reason)
        return found

    def detail(self, ref: RecordRef) -> str:
        (event,) = [one for one in self.groups if isinstance(one, GroupDiscarded) and one.task == ref]
        return event.detail


@pytest.fixture(params=["lives on", "restarts"])
def world(request: pytest.FixtureRequest) -> World:
    """With "restarts", the controller is killed after whatever it takes in and after whatever it decides."""
    if request.param == "lives on":
        return World()

    class Restarting(World):
        def put(self, event: TaskEvent, partition: int = 0) -> RecordRef:
            ref = super().put(event, partition)
            self.restart()
            return ref

        def decide(self, slots: int = 100) -> list[GroupEvent]:
            decided = super().decide(slots)
            self.restart()
            return decided

    return Restarting()


def test_a_cancellation_of_a_task_that_nobody_published_does_not_hold_for_a_later_one(world: World) -> None:
    world.put(TaskCancelled(task_id="t"))
    world.decide()
    ref = world.put(task())
    world.decide()
    assert world.outcomes() == {ref: [OPENED]}


def test_a_task_published_after_its_cancellation_under_another_key_is_a_new_task(world: World) -> None:
    first = world.put(task())
    world.decide()
    world.put(TaskCancelled(task_id="t"))
    world.decide()
    second = world.put(task(idempotency_key="again"))
    world.decide()
    world.decide()
    assert world.outcomes() == {first: [OPENED, "cancelled"], second: [OPENED]}


def test_a_task_cancelled_before_it_had_a_group_is_told_and_uses_up_no_key(world: World) -> None:
    first = world.put(task())
    world.put(TaskCancelled(task_id="t"))
    second = world.put(task())
    world.decide()
    world.decide()
    assert world.outcomes() == {first: ["cancelled"], second: [OPENED]}


@pytest.mark.parametrize("between", [0, 1])
def test_a_repetition_of_a_cancelled_task_is_refused_whether_its_group_is_closed_yet_or_not(
    world: World, between: int
) -> None:
    first = world.put(task())
    world.decide()
    world.put(TaskCancelled(task_id="t"))
    for _ in range(between):
        world.decide()
    second = world.put(task())
    world.decide()
    world.decide()
    assert world.outcomes() == {first: [OPENED, "cancelled"], second: ["refused"]}
    assert str(first) in world.detail(second) and "another idempotency key" in world.detail(second)


@pytest.mark.parametrize("first", ["task", "cancellation"])
def test_a_cancellation_in_another_partition_holds_whichever_is_read_first(world: World, first: str) -> None:
    """A foreign client hashes the same key to another partition than ours."""
    if first == "task":
        ref = world.put(task(), partition=1)
        cancelled = world.put(TaskCancelled(task_id="t"))
    else:
        cancelled = world.put(TaskCancelled(task_id="t"))
        ref = world.put(task(), partition=1)
    world.decide()
    assert world.outcomes() == {ref: ["cancelled"]}
    assert str(cancelled) in world.detail(ref)


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"instruction": "break"}, "task_digest"),
        ({"attempts": 3}, "attempts"),
        ({"purpose": "eval"}, "purpose"),
        ({"budget": Budget(max_turns=1)}, "budget"),
        ({"task_id": "other"}, "task_id"),
    ],
)
def test_another_task_with_the_key_of_one_is_refused_naming_both(
    world: World, opened: bool, changed: dict[str, Any], named: str
) -> None:
    first = world.put(task(idempotency_key="k"))
    if opened:
        world.decide()
    second = world.put(task(idempotency_key="k", **changed))
    world.decide()
    world.decide()
    assert world.outcomes() == {first: [OPENED], second: ["refused"]}
    assert all(part in world.detail(second) for part in (str(first), str(second), f"another {named};"))


@pytest.mark.parametrize("opened", [False, True])
def test_the_same_task_again_is_dropped_in_silence(world: World, opened: bool) -> None:
    first = world.put(task(labels={"a": "b"}))
    if opened:
        world.decide()
    world.put(task(labels={"a": "b"}))
    world.put(task(), partition=1)
    world.decide()
    world.decide()
    assert world.outcomes() == {first: [OPENED]}


def test_a_task_that_is_turned_away_is_told_though_the_controller_dies_in_between() -> None:
    """A group that is opened beside it says from where a successor reads."""
    world = World()
    refused = world.put(task("gone", policy_version=7))
    opened = world.put(task())
    world.decide()
    assert world.outcomes() == {opened: [OPENED]}, "the refusal is written a turn later"
    world.restart()
    world.decide()
    world.decide()
    assert world.outcomes() == {opened: [OPENED], refused: ["policy_version"]}


def test_a_cancelled_task_keeps_no_successor_reading_from_it() -> None:
    world = World()
    world.put(task())
    world.put(TaskCancelled(task_id="t"))
    world.decide()
    assert world.core.intake.low("tasks.v1") == [2]
