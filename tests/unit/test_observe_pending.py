"""What waits now, for whom, how long and until when: from the log alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.folded import folded
from support.run_log import LANE, Run, SessionWriter

from odradek.actors.policy.template import Call
from odradek.infra.cli.status import wait_lines, waits
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.pending import Pending, as_json, pending
from odradek.infra.observe.waits import constant
from odradek.streams.events.groups import GroupOpened
from odradek.streams.events.sessions import SessionOpened, ToolCompleted, ToolRequested, Usage
from odradek.streams.events.tasks import Budget
from odradek.streams.events.weights import CurrentWeights, VersionPublished

GRACE = constant("actors.session.clients.CALL_GRACE_S") or 0.0


class Story:
    """A run in which things stand still."""

    def __init__(self) -> None:
        self.run = Run()
        self.run.log.append("groups.v1", LANE.lane, LANE)
        self.run.publish(0)
        self.group = self.run.open_group(attempts=3)
        self.later(1)

    def later(self, seconds: float) -> None:
        self.run.log.now_ms += int(seconds * 1000)

    def session(self, attempt: int, group: GroupOpened | None = None) -> SessionWriter:
        group = group or self.group
        opened = SessionOpened(
            session_id=group.sessions[attempt], policy="demo", group_id=group.group_id, lane=group.lane,
            budget=Budget(tool_seconds=40.0),
        )  # fmt: skip
        writer = SessionWriter(self.run.log, opened.session_id, "rl", opened, self.run.text)
        writer.open("fix it")
        return writer

    def waits(self) -> list[Pending]:
        return pending(*folded(self.run.log), self.run.log.now_ms)


def of(found: list[Pending], kind: str) -> list[tuple[str, str, str, float, float | None]]:
    return [(one.who, one.what, one.owner, one.age_s, one.deadline_s) for one in found if one.wait == kind]


def requested(name: str) -> Any:
    return ToolRequested(call_id="0.0", turn=0, index=0, name=name, arguments={}, effect="workspace")


def test_a_session_waits_for_the_model_then_for_its_tool_then_for_its_verdict() -> None:
    """What hangs is named: the tool, the model or the grader, and who gives up on it."""
    story = Story()
    writer = story.session(0)
    story.later(7)
    ((who, what, owner, age, deadline),) = of(story.waits(), "model turn")
    assert (who, what, owner, age) == (story.group.sessions[0], "turn 0", "session actor", 7.0)
    assert deadline is not None and 60 < deadline < 600

    writer.turn(0, [1, 2], [Call("run_terminal", {"command": "sleep 99"})], 0)
    writer._put(requested("run_terminal"))
    story.later(30)
    assert of(story.waits(), "model turn") == []
    assert of(story.waits(), "tool call") == [
        (story.group.sessions[0], "run_terminal, turn 0", "session actor", 30.0, 40.0 + GRACE)
    ]
    writer._put(ToolCompleted(call_id="0.0", turn=0, index=0, text="ok"))
    story.later(2)
    assert of(story.waits(), "tool call") == []
    assert [row[1] for row in of(story.waits(), "model turn")] == ["turn 1"]

    writer.complete(Usage(), 0)
    story.later(11)
    assert of(story.waits(), "model turn") == []
    assert of(story.waits(), "grading") == [
        (
            story.group.sessions[0],
            "its verdict",
            "reward actor",
            11.0,
            constant("actors.reward.grader.GRADE_DEADLINE_S"),
        )
    ]


def test_an_open_group_waits_until_its_deadline_and_then_is_late() -> None:
    story = Story()
    assert of(story.waits(), "group") == [(story.group.group_id, "task task-1", "controller", 1.0, 900.0)]
    assert not any(one.late for one in story.waits())
    story.later(900)
    (late,) = [one for one in story.waits() if one.late]
    assert (late.wait, late.age_s) == ("group", 901.0)


def test_sealed_groups_wait_for_a_batch_and_batches_for_their_step() -> None:
    story = Story()
    story.run.group(0.5)
    story.later(5)
    (row,) = of(story.waits(), "assembly")
    assert row == (LANE.lane, "1 sealed groups; a batch takes 3 kept ones", "assembler", 5.0, None)
    run = story.run
    run.group(0.5)
    run.group(0.5)
    run.train()
    assert of(story.waits(), "assembly") == of(story.waits(), "training") == []
    step = run.log.records[-4]
    assert step.ref.topic == "batches.v1"
    run.log.records.remove(step)
    ((lane, what, owner, age, deadline),) = of(story.waits(), "training")
    assert (lane, what, owner, deadline) == (LANE.lane, "batch 0", "trainer", None) and age > 2


def test_a_replica_waits_for_the_weights_that_are_current() -> None:
    story = Story()
    assert of(story.waits(), "loading weights") == []
    where = {"policy": "demo", "version": 1, "manifest_key": "0/demo/main-0/1", "manifest_sha256": ""}
    story.run.log.append("weights.v1", "demo", VersionPublished(**where))  # type: ignore[arg-type]
    story.run.log.append("weights.current.v1", "demo", CurrentWeights(**where))  # type: ignore[arg-type]
    story.later(61)
    (row,) = of(story.waits(), "loading weights")
    assert row == ("inference-0", "version 1", "inference actor", 61.0, constant("actors.inference.serving.FETCH_S"))


def test_status_names_the_oldest_waits_with_owner_and_deadline_and_those_that_are_late() -> None:
    story = Story()
    for attempt in range(3):
        story.session(attempt)
    story.later(1000)
    view = ActorView("telemetry", True, state={"address": "http://x", "waits": as_json(story.waits())})
    waiting = waits([ActorView("controller", True), view])
    assert waiting == story.waits()
    lines = wait_lines(waiting)
    assert lines[0] == "  waiting longest:"
    assert lines[1] == f"     1001 s  group: {story.group.group_id} (task task-1); controller gives up at 900 s  LATE"
    assert len(lines) == 5 and all("session actor gives up at" in line for line in lines[2:])
    assert wait_lines([]) == []
    assert waits([ActorView("telemetry", False)]) == []


@pytest.mark.parametrize("path", ["actors.session.clients.NO_SUCH", "actors.no_such.THING"])
def test_a_constant_that_is_gone_is_an_error_and_not_no_deadline(path: str) -> None:
    with pytest.raises((AttributeError, ModuleNotFoundError), match=r"NO_SUCH|no_such"):
        constant(path)
