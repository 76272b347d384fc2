"""A controller beside other lanes and other policies: what is theirs is neither decided nor counted here."""

from __future__ import annotations

import msgspec
from support.assembly_world import LANE

from odradek.actors.controller.core import EVAL_LANE, Controller
from odradek.streams.events.groups import GroupOpened, GroupSealed, SealedMember
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.events.weights import VersionPublished

BRANCH = msgspec.structs.replace(LANE, lane="other-2", policy="other")


def opened(name: str, lane: str, policy: str, **fields: object) -> GroupOpened:
    base = {
        "group_id": name, "lane": lane, "ordinal": 0, "task": RecordRef("tasks.v1", 0, 0), "task_id": f"task-{name}",
        "task_digest": name, "purpose": "rl", "policy": policy, "sessions": [f"{name}.0", f"{name}.1"], "version": 0,
        "deadline_ms": 5,
    }  # fmt: skip
    return msgspec.convert(base | fields, GroupOpened)


def published(policy: str, version: int, key: str, *, restored: bool = False) -> VersionPublished:
    return VersionPublished(
        policy=policy, version=version, manifest_key=key, manifest_sha256="0", restored=restored
    )  # fmt: skip


def test_a_lane_that_shares_the_partition_is_not_this_controller_s() -> None:
    """A rescored lane of the same tasks lies in the branch's partition: neither its groups nor its keys count."""
    core = Controller(BRANCH)
    core.apply_group(0, opened("theirs", "rescored-2", "other"))
    members = [SealedMember(session_id=f"theirs.{i}", status="missing") for i in range(2)]
    core.apply_group(1, GroupSealed(group_id="theirs", lane="rescored-2", reason="complete", members=members))
    assert core.groups == {} and core.opened_count == 0 and core.backlog.sealed_groups == 0
    core.on_weights(published("other", 0, "k"))
    tests = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])
    task = TaskPublished(task_id="task-theirs", instruction="x", policy="other", files={"m.py": ""}, tests=tests)
    core.on_task(RecordRef("tasks.v1", 0, 7), task)
    assert [type(event).__name__ for event in core.decide(0, 100, [])] == ["GroupOpened"]


def test_an_open_evaluation_of_another_policy_is_left_to_who_serves_it() -> None:
    """Served here, its sessions would sample under this policy's weights of the same number."""
    core = Controller(BRANCH)
    core.apply_group(0, opened("eval", EVAL_LANE, "demo", purpose="eval", pinned_version=3))
    core.recovered()
    core.on_weights(published("other", 3, "k"))
    assert core.placements() == [] and core.decide(10**9, 100, []) == []
    assert core.intake.low("tasks.v1") == []


def test_a_restored_version_ends_what_stood_above_it() -> None:
    """Publications, pins and roll-backs of the incarnation before; and its manifest is what is served."""
    core = Controller(LANE)
    for version in range(4):
        core.on_weights(published("demo", version, f"0/demo/main-0/{version}"))
    (first,) = core.decide_weights()
    core.on_current(first)
    assert first.version == 3
    core.on_weights(published("demo", 1, "0-r1/demo/main-0/1", restored=True))
    (second,) = core.decide_weights()
    core.on_current(second)
    assert (second.version, second.manifest_key) == (1, "0-r1/demo/main-0/1")
    assert core.decide_weights() == []
    core.on_weights(published("demo", 2, "0-r1/demo/main-0/2"))
    (third,) = core.decide_weights()
    assert (third.version, third.manifest_key) == (2, "0-r1/demo/main-0/2")
