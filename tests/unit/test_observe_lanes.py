"""Lanes are counted apart (infra/observe/lanes.py)."""

from __future__ import annotations

from support.folded import folded, lanes_of
from support.run_log import RunLog, small_run

from odradek.infra.observe.lanes import lane_line, lane_text
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, LaneConfigured
from odradek.streams.events.meta import Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.weights import VersionPublished


def graded(log: RunLog, group: str, origin: Origin, *, solved: bool, lane: str, policy: str = "other") -> None:
    """A group of one graded session."""
    opened = GroupOpened(
        group_id=group,
        lane=lane,
        ordinal=0,
        task=RecordRef("tasks.v1", 0, 0),
        task_id=group,
        task_digest="0",
        purpose="eval" if origin == "eval" else "rl",
        policy=policy,
        sessions=[f"{group}-s"],
        version=7,
        deadline_ms=2**60,
        labels={"set": "unseen"} if origin == "eval" else {},
    )
    log.append("groups.v1", lane, opened)
    reward = RewardAssigned(
        session_id=f"{group}-s",
        group_id=group,
        partition=0,
        first_offset=0,
        last_offset=1,
        grader="g",
        grader_version="1",
        components={"solved": float(solved)},
        total=float(solved),
        oldest_version=7,
        newest_version=7,
    )
    log.append("rewards.v1", f"{group}-s", reward, meta=Meta(origin=origin))


def another_lane() -> RunLog:
    """Its partition of groups.v1 lies behind the one of the evaluations."""
    log = RunLog()
    log.append(
        "groups.v1",
        "other-2",
        LaneConfigured(lane="other-2", policy="other", groups_per_batch=1, attempts=2, max_staleness=1),
    )
    version = VersionPublished(policy="other", version=7, manifest_key="k", manifest_sha256="0", lane="other-2")
    log.append("weights.v1", "other", version)
    graded(log, "x", "rl", solved=True, lane="other-2")
    graded(log, "y", "eval", solved=False, lane="eval-1")
    log.append("groups.v1", "other-2", GroupDiscarded(group_id="x", lane="other-2", reason="deadline"))
    return log


def test_a_lane_beside_another_has_the_numbers_that_it_has_alone() -> None:
    """Otherwise a branch's versions and rates are those of nobody."""
    main = small_run()
    alone, _ = folded(main)
    lanes = lanes_of(main, another_lane())
    assert sorted(lanes.folds) == ["main-0", "other-2"]
    assert lane_line("main-0", lanes.folds["main-0"]) == lane_line("main-0", alone)
    assert lanes.folds["main-0"].events == alone.events
    other = lane_line("other-2", lanes.folds["other-2"])
    assert (other.policy, other.groups, other.sealed, other.discarded) == ("other", 2, 0, {"deadline": 1})
    (row,) = other.versions
    assert (row.version, row.training.solved, row.training.count) == (7, 1, 1)
    assert {name: (rate.solved, rate.count) for name, rate in row.held_out.items()} == {"unseen": (0, 1)}


def test_a_lanes_text_says_its_counts_and_its_first_and_last_rates() -> None:
    lanes = lanes_of(small_run(), another_lane())
    first, *rates = lane_text(lane_line("main-0", lanes.folds["main-0"])).splitlines()
    assert first.startswith("main-0 (policy demo): 37 groups opened, 36 sealed, 1 discarded (1 infrastructure)")
    assert first.endswith("3 batches, 3 steps")
    assert rates[0].startswith("  RL rollouts solved: ") and " at version 0 → " in rates[0]
    assert lane_text(lane_line("other-2", lanes.folds["other-2"])).splitlines()[1:] == [
        "  RL rollouts solved: 1 of 1 at version 7",
        "  held out unseen solved: 0 of 1 at version 7",
    ]
