"""A fold that went on from a snapshot is the fold of the whole log (actors/controller/past.py), whatever happened and
wherever it was cut, and what the controller then decides is the same."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.controller_world import LANE, SECRET, History, MemoryLog, plain

from odradek.actors.controller.core import EVAL_LANE, Controller
from odradek.actors.controller.past import Past, State
from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupOpened, GroupSealed, SealedMember
from odradek.streams.events.meta import RecordRef
from odradek.streams.snapshots import Mark

Snapshot = tuple[bytes, list[Mark]]


async def none(record: Record, _error: UndecodableRecord) -> None:
    raise AssertionError(f"{record.ref} is not readable")


async def folded(log: MemoryLog, now_ms: int, since: Snapshot | None = None) -> Past:
    past = Past.of_nothing(Controller(LANE))
    if since is not None:
        past.restore(msgspec.msgpack.decode(since[0], type=State), since[1])
    await past.advance(cast(Any, log), none, now_ms)
    return past


def everything(past: Past) -> Any:
    """All that a controller goes on with."""
    return plain([past.core, list(past.core.groups), past.configured, past.low, past.opened_ms]), {
        place: mark.next for place, mark in past.marks.items()
    }


def decisions(past: Past, log: MemoryLog, now_ms: int) -> list[Any]:
    """What a controller says in the turns after its start, once it has read the tasks that are not decided."""
    core, said = past.core, []
    for name, low in sorted(past.low.items()):
        for number in range(3):
            for record in log.records.get((name, number), [])[low[number] if number < len(low) else 0 :]:
                core.on_task(record.ref, record.event.body)
    for turn in range(3):
        now_ms += turn * 20_000
        made = core.decide(now_ms, 12, [0])
        said.append((made, core.decide_weights(), sorted(core.placements(), key=lambda one: one.session_id)))
        for number, one in enumerate(made):
            core.apply_group(10**6 * (turn + 1) + number, one, now_ms)
    return said


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 160), cuts=st.integers(1, 4))
def test_a_snapshot_and_the_rest_of_the_log_are_the_whole_log(seed: int, steps: int, cuts: int) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        history = History(chance)
        for _ in range(steps):
            history.step()
        log, snapshot = history.log, None
        log.grows = lambda _topic: chance.randrange(8)
        for _ in range(cuts):
            log.show(chance.randrange(len(log.order)))
            past = await folded(log, history.now_ms, snapshot)
            snapshot = past.export(), list(past.marks.values())
            assert SECRET.encode() not in snapshot[0], "no task's text and no verdict's"
        log.show_all()
        going_on, whole = await folded(log, history.now_ms, snapshot), await folded(log, history.now_ms)
        assert everything(going_on) == everything(whole)
        assert going_on.folded <= whole.folded
        later = history.now_ms + 1
        assert decisions(going_on, log, later) == decisions(whole, log, later)
        assert everything(going_on) == everything(whole), "in what follows from it, too"

    asyncio.run(scenario())


def opened(log: MemoryLog, ordinal: int, lane: str = LANE.lane) -> GroupOpened:
    one = GroupOpened(
        group_id=f"g{ordinal}", lane=lane, ordinal=ordinal, task=RecordRef("tasks.v1", 0, ordinal),
        task_id=f"t{ordinal}", task_digest="", purpose="rl" if lane == LANE.lane else "eval", policy="demo",
        sessions=[f"s{ordinal}"], version=0, deadline_ms=2**53,
    )  # fmt: skip
    log.append("groups.v1", lane, one, 1)
    return one


async def test_a_batch_of_a_group_that_was_sealed_during_the_fold_leaves_no_seal_behind() -> None:
    log = MemoryLog()
    group = opened(log, 0)
    log.show_all()
    members = [SealedMember(session_id="s0", status="missing")]
    seal = GroupSealed(group_id=group.group_id, lane=LANE.lane, reason="complete", members=members)
    at = log.append("groups.v1", LANE.lane, seal, 2)
    batch = BatchAssembled(
        batch_id="b", lane=LANE.lane, policy="demo", ordinal=0, groups=[at.offset], dropped=[], members=[], layout=[],
        merkle_root="", assembler_version=1, config_offset=0, input_offset=at.offset,
    )  # fmt: skip
    log.append("batches.v1", LANE.lane, batch, 3)
    log.grows = lambda topic: 2 if topic == "groups.v1" else 0
    past = await folded(log, 4)
    past = await folded(log, 4, (past.export(), list(past.marks.values())))
    assert past.core.sealed_after == [] and everything(past) == everything(await folded(log, 4))


async def test_groups_are_in_the_order_of_their_opening_wherever_the_fold_was_cut() -> None:
    log = MemoryLog()
    for ordinal, lane in enumerate([EVAL_LANE, LANE.lane, LANE.lane, EVAL_LANE]):
        opened(log, ordinal, lane)
    for cut in range(5):
        log.shown, log._next_shown = {}, 0
        log.show(cut)
        past = await folded(log, 1)
        log.show_all()
        past = await folded(log, 1, (past.export(), list(past.marks.values())))
        assert list(past.core.groups) == ["g0", "g1", "g2", "g3"]


def test_the_histories_hold_every_kind_of_decision_and_cuts_with_sessions_still_to_end() -> None:
    """So that the property above says something."""
    kinds: set[str] = set()
    waiting: list[int] = []
    for seed in range(40):
        history = History(random.Random(seed))
        for number in range(160):
            history.step()
            if number % 20 == 0:
                waiting.append(len(list(history.core.endings)))
        for place in history.log.records.values():
            for record in place:
                body = record.event.body
                kinds.add(f"{type(body).__name__} {getattr(body, 'reason', '')} {getattr(body, 'lane', '')}".strip())
    assert max(waiting) > 2
    wanted = [
        "LaneConfigured  main-0", "GroupOpened  main-0", "GroupOpened  eval-1", "MemberReplaced  main-0",
        "GroupSealed complete main-0", "GroupSealed complete eval-1", "GroupSealed deadline main-0",
        "GroupDiscarded cancelled main-0", "GroupDiscarded deadline main-0", "GroupDiscarded infrastructure main-0",
        "GroupDiscarded refused main-0", "GroupDiscarded policy_version main-0", "BatchAssembled  main-0",
        "StepCompleted  main-0", "IncarnationBegun  main-0", "VersionPublished  ", "VersionPinned", "VersionRolledBack",
        "VersionPruned", "TaskCancelled", "RewardUngraded", "CurrentWeights",
    ]  # fmt: skip
    assert [one for one in wanted if one.strip() not in kinds] == []
