"""Task topics of several tenants: whose a task is, and that no tenant starves another (actors/controller/intake.py,
admission.py)."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from odradek.actors.controller.core import Controller
from odradek.actors.controller.intake import tenant_of
from odradek.streams.events.groups import GroupDiscarded, GroupEvent, GroupOpened, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskCancelled, TaskPublished
from odradek.streams.events.weights import VersionPublished

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=10**6)
TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])
SLOTS = 12


class World:
    """A controller that several tenants publish to, and whose decisions land on a list standing for groups.v1."""

    def __init__(self, decided: list[GroupEvent] | None = None) -> None:
        self.core = Controller(LANE)
        self.log: list[GroupEvent] = []
        self.offsets: Counter[str] = Counter()
        self.rewards = 0
        for event in decided or []:
            self.fold(event)
        self.core.recovered()
        self.core.on_weights(VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="0"))

    def fold(self, event: GroupEvent) -> None:
        self.core.apply_group(len(self.log), event)
        self.log.append(event)

    def put(self, tenant: str, event: TaskPublished | TaskCancelled) -> RecordRef:
        topic = f"tasks.v1.{tenant}" if tenant else "tasks.v1"
        ref = RecordRef(topic, 0, self.offsets[topic])
        self.offsets[topic] += 1
        self.core.on_task(ref, event)
        return ref

    def publish(self, tenant: str, name: str, *, attempts: int = 2, **fields: object) -> RecordRef:
        task = TaskPublished(
            task_id=name,
            instruction=f"fix {name} of {tenant}",
            files={"m.py": ""},
            tests=TESTS,
            attempts=attempts,
            **fields,  # type: ignore[arg-type]
        )
        return self.put(tenant, task)

    def tick(self) -> list[GroupEvent]:
        free = SLOTS - sum(len(group.unfinished) for group in self.core.groups.values())
        decisions = self.core.decide(0, free, [0])
        for decision in decisions:
            self.fold(decision)
        return decisions

    def opened(self) -> list[tuple[str, str]]:
        return [(tenant_of(e.task), e.task_id) for e in self.tick() if isinstance(e, GroupOpened)]

    def finish(self, group_id: str) -> None:
        for session in list(self.core.groups[group_id].unfinished):
            reward = RewardAssigned(
                session_id=session, group_id=group_id, partition=0, first_offset=0, last_offset=1, grader="g",
                grader_version="1", components={"solved": 1.0}, total=1.0,
            )  # fmt: skip
            self.core.on_verdict(RecordRef("rewards.v1", 0, self.rewards), reward)
            self.rewards += 1


def test_the_tenant_is_the_topics_and_keys_of_one_mean_nothing_to_another() -> None:
    world = World()
    for tenant in ("", "acme", "initech"):
        world.publish(tenant, "t", idempotency_key="k")
        world.publish(tenant, "t", idempotency_key="k")
    assert sorted(world.opened()) == [("", "t"), ("acme", "t"), ("initech", "t")]
    world.put("acme", TaskCancelled(task_id="t"))
    decided = world.tick()
    assert [tenant_of(e.task) for e in decided if isinstance(e, GroupDiscarded) and e.task is not None] == ["acme"]
    assert [tenant_of(group.opened.task) for group in world.core.groups.values()] == ["", "initech"]


def test_a_cancellation_takes_only_its_own_tenants_waiting_task_out() -> None:
    world = World()
    for number in range(SLOTS):
        world.publish("", f"busy-{number}")
    world.tick()
    for tenant in ("acme", "initech"):
        world.publish(tenant, "t")
    world.put("acme", TaskCancelled(task_id="t"))
    assert [head.tenant for head in world.core.queue.heads() if head.task.task_id == "t"] == ["initech"]


def test_no_tenant_starves_another_however_much_it_publishes() -> None:
    world = World()
    for number in range(200):
        world.publish("acme", f"flood-{number}", priority=10**6)
    world.publish("", "first")
    world.publish("initech", "second")
    opened = world.opened()
    assert len(opened) == SLOTS // 2
    assert {("", "first"), ("initech", "second")} <= set(opened)


def test_a_tenant_that_comes_late_gets_the_next_slots_that_are_free() -> None:
    world = World()
    for number in range(50):
        world.publish("acme", f"flood-{number}")
    world.tick()
    world.publish("late", "now")
    assert world.opened() == []
    world.finish(next(iter(world.core.groups)))
    world.tick()
    assert ("late", "now") in [(tenant_of(g.opened.task), g.opened.task_id) for g in world.core.groups.values()]


def test_a_large_group_is_not_kept_out_by_small_ones_of_others() -> None:
    world = World()
    for number in range(100):
        world.publish("small", f"s-{number}")
    world.tick()
    world.publish("large", "l", attempts=SLOTS)
    for _ in range(SLOTS // 2):
        world.finish(next(g for g, state in world.core.groups.items() if tenant_of(state.opened.task) == "small"))
        world.tick()
    assert [group.opened.task_id for group in world.core.groups.values()] == ["l"]


def test_an_evaluation_does_not_wait_behind_another_tenants_training() -> None:
    world = World()
    world.core.backlog.max_staleness = 0
    world.publish("acme", "train")
    world.core.backlog.pending_batches = 5
    world.publish("initech", "measure", purpose="eval", attempts=1)
    assert world.opened() == [("initech", "measure")]


def test_rl_on_what_any_tenant_published_for_evaluation_is_refused() -> None:
    world = World()
    task = TaskPublished(task_id="e", instruction="fix", files={"m.py": ""}, tests=TESTS, purpose="eval", attempts=1)
    world.put("acme", task)
    world.put("initech", TaskPublished(task_id="r", instruction="fix", files={"m.py": ""}, tests=TESTS, attempts=2))
    assert [type(event).__name__ for event in world.tick()] == ["GroupDiscarded", "GroupOpened"]


def test_a_refused_task_can_be_mended_and_published_again_under_its_id() -> None:
    world = World()
    world.publish("acme", "t", attempts=0)
    assert [type(event).__name__ for event in world.tick()] == ["GroupDiscarded"]
    world.publish("acme", "t")
    assert world.opened() == [("acme", "t")]


def test_a_restarted_controller_has_the_same_shares_and_begins_where_nothing_is_missed() -> None:
    world = World()
    for number in range(30):
        world.publish("acme", f"a-{number}")
    world.publish("initech", "i")
    world.tick()
    world.finish(next(iter(world.core.groups)))
    world.tick()
    world.tick()
    latest = [event for event in world.log if isinstance(event, GroupOpened)][-1]
    assert latest.tenants_low.keys() == {"tasks.v1.acme", "tasks.v1.initech"}
    (low,) = latest.tenants_low["tasks.v1.acme"]
    opened = {event.task.offset for event in world.log if isinstance(event, GroupOpened) and "acme" in event.task.topic}
    assert low > 0 and set(range(low)) <= opened
    again = World(world.log)
    assert again.core.shares().sessions == world.core.shares().sessions
    for number in range(low, 30):
        again.core.on_task(
            RecordRef("tasks.v1.acme", 0, number),
            TaskPublished(task_id=f"a-{number}", instruction="x", files={"m.py": ""}, tests=TESTS, attempts=2),
        )
    assert len(again.core.queue) == 30 - len(opened)


@pytest.mark.parametrize("tenants", [2, 3])
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_every_tenant_that_waits_is_served_whatever_the_others_do(tenants: int, data: st.DataObject) -> None:
    """Tenant 0 always has tasks waiting; the others publish as they like. Whoever is served has at most one group more
    under way than tenant 0, so that tenant 0 holds its share of the slots."""
    world = World()
    for number in range(200):
        world.publish("t0", f"p-{number}")
    for step in range(25):
        for tenant in range(1, tenants):
            for number in range(data.draw(st.integers(0, 3))):
                world.publish(f"t{tenant}", f"{step}-{number}", priority=data.draw(st.integers(0, 9)))
        if world.core.groups:
            world.finish(data.draw(st.sampled_from(sorted(world.core.groups))))
        served = {tenant for tenant, _ in world.opened()}
        under_way = world.core.shares().sessions
        assert all(under_way[tenant] <= under_way.get("t0", 0) + 2 for tenant in served)
    assert under_way["t0"] >= SLOTS // tenants - 2
