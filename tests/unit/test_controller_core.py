"""The controller's promises (actors/controller/core.py), each by its name."""

from __future__ import annotations

from typing import Any

import pytest

from odradek.actors.controller.core import EVAL_LANE, Controller
from odradek.actors.controller.endings import REMEMBERED_MS
from odradek.actors.controller.groups import MAX_REPLACEMENTS
from odradek.actors.controller.identity import group_id
from odradek.actors.controller.placement import LOST_AFTER_S, Placer, host_of
from odradek.streams.codec import encode
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import (
    GroupDiscarded,
    GroupEvent,
    GroupOpened,
    GroupSealed,
    LaneConfigured,
    MemberReplaced,
)
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.tasks import Budget, HiddenCase, HiddenTests, TaskCancelled, TaskPublished
from odradek.streams.events.weights import VersionPinned, VersionPublished, VersionRolledBack

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2)


TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])


def task(name: str, *, instruction: str = "", attempts: int = 2, **fields: object) -> TaskPublished:
    return TaskPublished(
        task_id=name,
        instruction=instruction or f"fix {name}",
        files={"m.py": ""},
        tests=TESTS,
        attempts=attempts,
        **fields,  # type: ignore[arg-type]
    )


def published(version: int) -> VersionPublished:
    return VersionPublished(policy="demo", version=version, manifest_key=f"k/{version}", manifest_sha256="0")


class World:
    """A controller whose decisions land on a list standing for groups.v1."""

    def __init__(self, log: list[GroupEvent] | None = None) -> None:
        self.core = Controller(LANE)
        self.log: list[GroupEvent] = []
        self.task_offset = 0
        self.reward_offset = 0
        for event in log or []:
            self._fold(event)
        self.core.recovered()

    def _fold(self, event: GroupEvent) -> None:
        self.core.apply_group(len(self.log), event)
        self.log.append(event)

    def tick(self, now_ms: int = 0, slots: int = 100) -> list[GroupEvent]:
        decisions = self.core.decide(now_ms, slots, [0])
        for decision in decisions:
            self._fold(decision)
        return decisions

    def publish(self, event: TaskPublished | TaskCancelled) -> RecordRef:
        ref = RecordRef("tasks.v1", 0, self.task_offset)
        self.task_offset += 1
        self.core.on_task(ref, event)
        return ref

    def opened(self, *names: str) -> list[GroupOpened]:
        self.core.on_weights(published(0))
        for name in names:
            self.publish(task(name))
        return [event for event in self.tick() if isinstance(event, GroupOpened)]

    def reward(self, group: GroupOpened, session: str, solved: float = 1.0) -> None:
        self._verdict(
            RewardAssigned(
                session_id=session,
                group_id=group.group_id,
                partition=0,
                first_offset=0,
                last_offset=1,
                grader="g",
                grader_version="1",
                components={"solved": solved},
                total=solved,
                sampled_tokens=7,
            )
        )

    def lose(self, group: GroupOpened, session: str, retryable: bool = True) -> None:
        self._verdict(
            RewardUngraded(
                session_id=session,
                group_id=group.group_id,
                partition=0,
                first_offset=0,
                last_offset=1,
                grader="g",
                grader_version="1",
                cause="host lost",
                retryable=retryable,
            )
        )

    def _verdict(self, verdict: RewardAssigned | RewardUngraded) -> None:
        self.core.on_verdict(RecordRef("rewards.v1", 0, self.reward_offset), verdict)
        self.reward_offset += 1


def test_a_task_record_leads_to_one_group_and_the_same_key_twice_is_one_task() -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("a", idempotency_key="k"))
    world.publish(task("b", idempotency_key="k"))
    world.publish(task("a"))
    world.publish(task("a"))
    opened = [e for e in world.tick() if isinstance(e, GroupOpened)]
    assert [e.task_id for e in opened] == ["a", "a"]
    assert world.tick() == []


def test_a_restarted_controller_opens_what_is_missing_and_nothing_twice() -> None:
    world = World()
    world.opened("a", "b")
    again = World(world.log)
    again.core.on_weights(published(0))
    for name in ("a", "b", "c"):
        again.publish(task(name))
    assert [e.task_id for e in again.tick() if isinstance(e, GroupOpened)] == ["c"]


def test_every_member_of_every_open_group_is_placed_until_it_has_a_verdict() -> None:
    world = World()
    (group,) = world.opened("a")
    assert [(p.session_id, p.fresh) for p in world.core.placements()] == [(s, True) for s in group.sessions]
    world.core.placed(group.sessions[0])
    world.reward(group, group.sessions[1])
    assert [(p.session_id, p.fresh) for p in world.core.placements()] == [(group.sessions[0], False)]
    assert all(not p.fresh for p in World(world.log).core.placements())


def test_a_group_is_sealed_with_exact_offsets_when_every_member_has_a_verdict() -> None:
    world = World()
    (group,) = world.opened("a")
    world.reward(group, group.sessions[0])
    assert world.tick() == []
    world.reward(group, group.sessions[1], 0.0)
    (sealed,) = world.tick()
    assert isinstance(sealed, GroupSealed) and sealed.reason == "complete"
    assert [(m.session_id, m.first_offset, m.last_offset, m.status) for m in sealed.members] == [
        (session, 0, 1, "rewarded") for session in group.sessions
    ]
    assert [m.reward for m in sealed.members] == [RecordRef("rewards.v1", 0, 0), RecordRef("rewards.v1", 0, 1)]


def test_a_reward_after_the_seal_changes_nothing() -> None:
    world = World()
    (group,) = world.opened("a")
    for session in group.sessions:
        world.reward(group, session)
    world.tick()
    world.reward(group, group.sessions[0], 0.0)
    assert world.tick() == []


def test_a_failure_of_ours_gets_a_fresh_attempt_then_the_group_is_discarded() -> None:
    """Guarantee 11: never scored; the discard names its cause and the lengths of what had finished."""
    world = World()
    (group,) = world.opened("a")
    world.reward(group, group.sessions[1])
    lost = group.sessions[0]
    for _ in range(MAX_REPLACEMENTS):
        world.lose(group, lost)
        (replaced,) = world.tick()
        assert isinstance(replaced, MemberReplaced) and replaced.lost_session == lost
        assert replaced.new_session not in group.sessions
        lost = replaced.new_session
    world.lose(group, lost)
    (discarded,) = world.tick()
    assert isinstance(discarded, GroupDiscarded) and discarded.reason == "infrastructure"
    assert "host lost" in discarded.detail and discarded.member_tokens == [7]
    assert world.core.backlog.open_groups == 0


def test_a_terminal_fault_discards_at_once() -> None:
    world = World()
    (group,) = world.opened("a")
    world.lose(group, group.sessions[0], retryable=False)
    (discarded,) = world.tick()
    assert isinstance(discarded, GroupDiscarded)


def test_a_group_past_its_deadline_is_sealed_without_the_missing_or_discarded() -> None:
    """Guarantee 12: nothing waits for ever."""
    world = World()
    first, second = world.opened("a", "b")
    late = first.deadline_ms + 1
    for session in first.sessions:
        world.reward(first, session)
    world.reward(second, second.sessions[0])
    decided = {e.group_id: e for e in world.tick(late) if isinstance(e, GroupSealed | GroupDiscarded)}
    assert isinstance(decided[first.group_id], GroupSealed)
    assert isinstance(decided[second.group_id], GroupDiscarded)


def test_whoever_a_group_was_closed_without_is_placed_to_be_ended_until_its_verdict() -> None:
    """Sealed at the deadline or discarded, by this controller or by its predecessor."""
    world = World()
    world.core.on_weights(published(0))
    for name, fields in (("a", {"purpose": "eval"}), ("b", {})):
        world.publish(task(name, **fields))
    sealed, discarded = (event for event in world.tick() if isinstance(event, GroupOpened))
    world.reward(sealed, sealed.sessions[0])
    assert not any(one.closed for one in world.core.placements())
    closed = world.tick(max(sealed.deadline_ms, discarded.deadline_ms))
    assert [type(event) for event in closed] == [GroupSealed, GroupDiscarded]
    left = [sealed.sessions[1], *discarded.sessions]
    for core in (world.core, World(world.log).core):
        assert [(one.session_id, one.closed, one.fresh) for one in core.placements()] == [
            (session, True, False) for session in left
        ]
    for number, session in enumerate(left):
        world.reward(discarded, session)
        assert [one.session_id for one in world.core.placements()] == left[number + 1 :], "it has ended"


def test_a_session_that_nobody_could_end_for_a_week_is_forgotten() -> None:
    world = World()
    (group,) = world.opened("a")
    world.publish(TaskCancelled(task_id="a"))
    world.tick()
    assert len(world.core.placements()) == len(group.sessions)
    world.tick(REMEMBERED_MS - 1)
    assert len(world.core.placements()) == len(group.sessions)
    world.tick(REMEMBERED_MS)
    assert world.core.placements() == []


def test_a_cancelled_task_is_taken_out_or_its_group_discarded() -> None:
    world = World()
    (group,) = world.opened("a")
    waiting = world.publish(task("b"))
    world.publish(TaskCancelled(task_id="b"))
    world.publish(TaskCancelled(task_id="a"))
    decided = [event for event in world.tick() if isinstance(event, GroupDiscarded) and event.reason == "cancelled"]
    assert [event.group_id for event in decided] == [group_id(waiting), group.group_id]
    assert [type(event) for event in world.log] == [GroupOpened, GroupDiscarded, GroupDiscarded]


def test_rl_on_a_task_published_for_evaluation_is_refused() -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("e", instruction="fix x", purpose="eval", attempts=1))
    world.publish(task("r", instruction="fix x"))
    decided = world.tick()
    assert [type(e) for e in decided] == [GroupDiscarded, GroupOpened]
    assert isinstance(decided[0], GroupDiscarded) and decided[0].reason == "refused"


@pytest.mark.parametrize(("attempts", "says"), [(0, "attempts"), (-3, "attempts"), (10**6, "attempts")])
def test_a_task_that_cannot_be_run_is_refused_and_holds_nobody_up(attempts: int, says: str) -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("bad", attempts=attempts))
    world.publish(task("good"))
    decided = world.tick()
    assert [type(e) for e in decided] == [GroupDiscarded, GroupOpened]
    assert isinstance(decided[0], GroupDiscarded) and says in decided[0].detail


def test_evaluation_is_pinned_opened_first_and_never_in_the_assemblers_lane() -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("rl"))
    world.publish(task("e", instruction="fix y", purpose="eval", attempts=1))
    first, second = (e for e in world.tick() if isinstance(e, GroupOpened))
    assert (first.purpose, first.lane, first.pinned_version) == ("eval", EVAL_LANE, 0)
    assert (second.purpose, second.lane, second.pinned_version) == ("rl", "main-0", None)


def test_a_version_that_does_not_exist_is_refused() -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("a", policy_version=9))
    world.tick()
    (refused,) = world.tick()
    assert isinstance(refused, GroupDiscarded) and refused.reason == "policy_version" and "9" in refused.detail


def batch(ordinal: int, input_offset: int) -> BatchAssembled:
    return BatchAssembled(
        batch_id=f"b{ordinal}",
        lane="main-0",
        policy="demo",
        ordinal=ordinal,
        groups=[1, 2],
        dropped=[],
        members=[],
        layout=[],
        merkle_root="",
        assembler_version=1,
        config_offset=0,
        input_offset=input_offset,
    )


def test_admission_keeps_the_expected_staleness_below_the_bound() -> None:
    """Guarantee 6, at admission: with two kept groups a batch and a bound of two, at most four groups are under way
    before the trainer has caught up."""
    world = World()
    opened = world.opened(*(f"t{i}" for i in range(20)))
    assert len(opened) == 4
    for group in opened:
        world.reward(group, group.sessions[0], 1.0)
        world.reward(group, group.sessions[1], 0.0)
    assert all(isinstance(e, GroupSealed) and e.mixed for e in world.tick())
    world.core.on_batch(batch(0, 10**6))
    world.core.on_batch(batch(1, 10**6))
    assert world.tick() == []
    world.core.on_batch(
        StepCompleted(
            lane="main-0",
            policy="demo",
            step=1,
            batch_id="b0",
            batch_offset=0,
            manifest_key="",
            manifest_sha256="",
        )
    )
    assert len(world.tick()) == 2


def test_flat_groups_do_not_hold_admission_up() -> None:
    """Groups that assembly will drop lead to no batch: they must not count as work under way."""
    world = World()
    opened = world.opened(*(f"t{i}" for i in range(200)))
    for _ in range(3):
        for group in opened:
            for session in group.sessions:
                world.reward(group, session)
        decided = world.tick()
        assert [e.mixed for e in decided if isinstance(e, GroupSealed)] == [False] * len(opened)
        opened = [e for e in world.tick() if isinstance(e, GroupOpened)]
        assert len(opened) >= 4


def test_admission_never_starves_when_nothing_is_under_way() -> None:
    """Mixed groups that assembly dropped for a reason of its own do not stop the lane for ever."""
    world = World()
    for name in "abcdefgh":
        world.core.backlog.open_groups = 0
        world.core._sealed_after = list(range(100))
        world.core._count()
        assert [e.task_id for e in world.opened(name) if isinstance(e, GroupOpened)] == [name]
        world.core.groups.clear()


def test_slots_bound_what_is_opened() -> None:
    world = World()
    world.core.on_weights(published(0))
    for name in "abc":
        world.publish(task(name))
    assert len(world.tick(slots=5)) == 2


def test_only_the_controller_decides_what_is_served() -> None:
    """A training commit never undoes a pin or a roll-back."""
    core = Controller(LANE)
    core.on_weights(published(0))
    core.on_weights(published(1))
    (change,) = core.decide_weights()
    assert change.version == 1
    core.on_current(change)
    core.on_weights(VersionPinned(policy="demo", version=0))
    core.on_weights(published(2))
    (change,) = core.decide_weights()
    assert change.version == 0
    core.on_current(change)
    core.on_weights(VersionPinned(policy="demo", version=None))
    core.on_weights(VersionRolledBack(policy="demo", to_version=1))
    (change,) = core.decide_weights()
    assert change.version == 1
    core.on_current(change)
    assert core.decide_weights() == []


def test_a_member_is_handed_over_again_only_when_its_host_restarted_or_lost_it() -> None:
    placer = Placer(hosts=1)
    assert placer.due(["s"], {0: "boot1"}, {0: frozenset()}, 0.0) == ["s"]
    placer.handed_over("s", "boot1", 0.0)
    assert placer.due(["s"], {0: "boot1"}, {0: frozenset({"s"})}, 1.0) == []
    assert placer.due(["s"], {0: "boot2"}, {0: frozenset()}, 2.0) == ["s"]
    assert placer.due(["s"], {0: "boot1"}, {0: frozenset()}, 2.0) == []
    assert placer.due(["s"], {0: "boot1"}, {0: frozenset()}, 2.0 + LOST_AFTER_S) == ["s"]
    assert placer.due(["s"], {}, {}, 1000.0) == []


def test_the_host_of_a_session_follows_from_its_id() -> None:
    assert {host_of(f"s{i}", 3) for i in range(50)} == {0, 1, 2}
    assert all(host_of(f"s{i}", 3) == host_of(f"s{i}", 3) for i in range(50))


def test_a_task_for_a_policy_that_is_not_served_is_refused_and_holds_up_nobody() -> None:
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("foreign", policy="other", priority=10**6))
    world.publish(task("good"))
    decisions = world.tick()
    refused = [event for event in decisions if isinstance(event, GroupDiscarded)]
    assert [event.detail for event in refused] == ["task foreign: policy: 'other' is not served here, expected 'demo'"]
    assert [event.task_id for event in decisions if isinstance(event, GroupOpened)] == ["good"]


HOSTILE: list[dict[str, Any]] = [
    {"deadline_seconds": 1e300},
    {"deadline_seconds": 1e17},
    {"budget": Budget(max_turns=10**30)},
    {"budget": Budget(wall_seconds=1e300)},
    {"policy_version": 2**70},
    {"attempts": 10**4000},
    {"labels": {"a": "b" * 7_900_000}},
    {"idempotency_key": "k" * 7_900_000},
    {"policy": "p" * 7_900_000},
    {"image": "p" * 7_900_000},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=[next(iter(fields)) for fields in HOSTILE])
def test_no_task_makes_a_decision_that_cannot_be_written(fields: dict[str, Any]) -> None:
    """Any client may publish: a decision that can't be encoded would end the controller at every start, for ever."""
    world = World()
    world.core.on_weights(published(0))
    world.publish(task("hostile", **{"attempts": 2} | fields))
    world.publish(task("good"))
    decisions = world.tick() + world.tick()
    assert "good" in [event.task_id for event in decisions if isinstance(event, GroupOpened)]
    assert all(len(encode(event, Meta())) < 4096 for event in decisions)
