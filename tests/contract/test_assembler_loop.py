"""The assembler's promises against a real broker: killed anywhere, each kept group is in exactly one batch.

Groups, sessions and rewards are written to the log by hand (`support.lane_world`); the loop under test is the real one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from support.assembly_world import turn
from support.lane_world import LaneWorld, stopped, until

from odradek.streams import faults
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.assembly.v1 import merkle
from odradek.streams.codec import f32
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import NoPosition, ProducerFenced, TransactionLost
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import SealedMember
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import rebuild_all, verify_batch
from odradek.streams.testing import an_event, event_log, kafka_config

__all__ = ["event_log", "kafka_config"]
pytestmark = pytest.mark.contract

POINTS = [point for point in faults.POINTS if point.startswith("assembler.")]


@pytest.fixture
def lane(event_log: EventLog) -> LaneWorld:
    return LaneWorld(event_log)


@asynccontextmanager
async def assembling(lane: LaneWorld) -> AsyncIterator[asyncio.Task[None]]:
    """A holder that runs inside the block and is cancelled after it."""
    task = asyncio.create_task(Assembler(lane.log, lane.lane).run())
    try:
        yield task
    finally:
        await stopped(task)


async def assembled(lane: LaneWorld, count: int) -> list[BatchAssembled]:
    """Run a fresh holder until the lane has `count` batches; returns all of them."""

    async def enough() -> bool:
        return len(await lane.batches()) >= count

    async with assembling(lane) as task:
        await until(task, enough)
    return [batch for _, batch in await lane.batches()]


async def die() -> None:
    raise faults.Killed


class Nth:
    """Dies at the nth time the point is reached."""

    def __init__(self, count: int) -> None:
        self.left = count

    async def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise faults.Killed


class Hold:
    """Stands still at the point: a process that was paused, or cut off, while its successor starts."""

    def __init__(self) -> None:
        self.reached, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.release.wait()


def members_once(batches: list[BatchAssembled]) -> bool:
    sessions = [member.session_id for batch in batches for member in batch.members]
    return len(sessions) == len(set(sessions))


# -- guarantee 4: trained once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_point_no_group_is_batched_twice_and_none_is_skipped(lane: LaneWorld, point: str) -> None:
    await lane.configure()
    kept = [await lane.group() for _ in range(3)]
    await lane.group([0.0, 0.0])
    kept += [await lane.group()]

    with faults.armed(point, Nth(3) if point == "assembler.group_read" else die), pytest.raises(faults.Killed):
        await asyncio.wait_for(Assembler(lane.log, lane.lane).run(), 60)
    before = [batch.ordinal for _, batch in await lane.batches()]
    sent = await lane.written()
    match point:
        case "assembler.group_read":
            assert (before, sent) == ([0], 1), "it died with one batch committed and a third group read"
        case "assembler.before_commit":
            assert (before, sent) == ([], 1), "its batch was on the broker, and nobody may see it"
        case _:
            assert (before, sent) == ([0], 1), "its batch was committed, and it died before it knew"

    batches = await assembled(lane, 2)
    assert [batch.ordinal for batch in batches] == [0, 1]
    assert [offset for batch in batches for offset in batch.groups] == kept
    assert [dropped.reason for batch in batches for dropped in batch.dropped] == ["flat"]
    assert members_once(batches)


async def test_killed_again_and_again_each_kept_group_is_in_exactly_one_batch(lane: LaneWorld) -> None:
    seed = 11
    print(f"seed {seed}")
    chance = random.Random(seed)
    await lane.configure()
    kept = []
    for _ in range(10):
        flat = chance.random() < 0.3
        offset = await lane.group([1.0, 1.0] if flat else [1.0, 0.0])
        kept += [] if flat else [offset]
    kills = 0
    while len(await lane.batches()) < len(kept) // 2 and kills < 20:
        with faults.armed(chance.choice(POINTS), Nth(chance.randrange(1, 4))):
            async with assembling(lane) as task:
                await asyncio.wait([task], timeout=3.0)
                kills += task.done() and isinstance(task.exception(), faults.Killed)
    assert kills >= 2
    batches = [batch for _, batch in await lane.batches()]
    assert [batch.ordinal for batch in batches] == list(range(len(kept) // 2))
    assert [offset for batch in batches for offset in batch.groups] == kept[: len(kept) // 2 * 2]
    assert str(await rebuild_all(lane.log, lane.lane)) == f"{len(batches)}/{len(batches)} byte-identical"


async def test_a_zombie_assembler_is_fenced_and_its_batch_is_invisible(lane: LaneWorld) -> None:
    await lane.configure()
    groups = [await lane.group() for _ in range(2)]
    hold = Hold()
    with faults.armed("assembler.before_commit", hold):
        zombie = asyncio.create_task(Assembler(lane.log, lane.lane).run())
        await asyncio.wait_for(hold.reached.wait(), 60)
    assert await lane.written() == 1, "the zombie's batch is on the broker, its transaction open"
    batches = await assembled(lane, 1)
    hold.release.set()
    with pytest.raises((ProducerFenced, TransactionLost)):
        await asyncio.wait_for(zombie, 60)
    assert await lane.written() == 2
    assert [batch.groups for _, batch in await lane.batches()] == [groups] == [batch.groups for batch in batches]


async def test_the_next_holder_makes_the_very_batch_that_was_lost(lane: LaneWorld) -> None:
    """Guarantee 5: the same records at the same positions give the same bytes, whoever assembles them."""
    await lane.configure()
    for _ in range(3):
        await lane.group()
    with faults.armed("assembler.before_commit", die), pytest.raises(faults.Killed):
        await asyncio.wait_for(Assembler(lane.log, lane.lane).run(), 60)
    assert await lane.batches() == []
    await assembled(lane, 1)
    lost, made = await lane.sent()
    assert lost == made


async def test_two_lanes_of_one_partition_do_not_mix(lane: LaneWorld) -> None:
    other = LaneWorld(lane.log)
    for world in (lane, other):
        await world.configure()
    mine = [await world.group() for _ in range(2) for world in (lane, other)]
    (batch,) = await assembled(lane, 1)
    assert batch.groups == mine[0::2]
    assert await other.batches() == []


async def test_a_seal_before_any_configuration_stops_the_lane_and_says_where(lane: LaneWorld) -> None:
    offset = await lane.group()
    with pytest.raises(NoPosition, match=rf"lane {lane.lane}.*groups\.v1/0@{offset}"):
        await asyncio.wait_for(Assembler(lane.log, lane.lane).run(), 60)


# -- what is left out, and why ------------------------------------------------------------------------------------


def reasons(batch: BatchAssembled) -> dict[int, str]:
    return {dropped.offset: dropped.reason for dropped in batch.dropped}


async def test_a_session_with_an_undecodable_record_drops_its_group_and_the_lane_goes_on(lane: LaneWorld) -> None:
    await lane.configure()
    bad = await lane.group(poison=b"\xc1 not msgpack")
    good = [await lane.group() for _ in range(2)]
    (batch,) = await assembled(lane, 1)
    assert batch.groups == good
    assert reasons(batch) == {bad: "undecodable"}
    assert str(await rebuild_all(lane.log, lane.lane)) == "1/1 byte-identical", "undecodable for replay as well"


@pytest.mark.parametrize(
    "broken",
    [
        {"completion": b"\x01\x02\x03"},
        {"logprobs": f32([-1.0])},
        {"logprobs": f32([float("nan")] * 4)},
        {"position": 9},
        {"prompt": b""},
    ],
    ids=["torn array", "a log-prob short", "log-probs that are not finite", "a hole", "a first token nobody gave"],
)
async def test_a_session_that_no_trainer_can_use_drops_its_group_and_the_lane_goes_on(
    lane: LaneWorld, broken: dict[str, object]
) -> None:
    await lane.configure()
    said = turn(0, 0, [1, 2, 3], [4, 5, 6, 7])
    bad = await lane.group(turns=[msgspec.structs.replace(said, **broken)])
    good = [await lane.group() for _ in range(2)]
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == (good, {bad: "undecodable"})


async def test_a_reward_that_is_not_finite_drops_its_group_and_the_lane_goes_on(lane: LaneWorld) -> None:
    """Guarantee 11: a failure of ours is never a reward."""
    await lane.configure()
    bad = [await lane.group([1.0, float("nan")]), await lane.group([float("inf"), 0.0])]
    good = [await lane.group() for _ in range(2)]
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == (good, dict.fromkeys(bad, "infrastructure"))


async def test_a_reward_record_that_is_not_there_drops_its_group(lane: LaneWorld) -> None:
    await lane.configure()
    turns = [turn(0, 0, [1], [2, 3])]
    sessions = [await lane.session(f"{lane.lane}.odd.{i}", turns) for i in range(2)]
    members = [await lane.member(session, "odd", float(i)) for i, session in enumerate(sessions)]
    astray = msgspec.structs.replace(members[0], reward=members[1].reward)
    bad = await lane.end("odd", [astray, members[1]])
    good = [await lane.group() for _ in range(2)]
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == (good, {bad: "infrastructure"})


# -- configuration and consent ------------------------------------------------------------------------------------


async def test_a_configuration_changed_between_batches_is_honoured_and_its_offset_recorded(lane: LaneWorld) -> None:
    first = await lane.configure()
    early = [await lane.group() for _ in range(2)]
    second = await lane.configure(groups_per_batch=3, advantage="rloo", token_budget=16)
    late = [await lane.group() for _ in range(3)]
    batches = await assembled(lane, 2)
    assert [(b.groups, b.config_offset) for b in batches] == [(early, first), (late, second)]
    assert {abs(m.advantage) for m in batches[0].members} == {0.5}
    assert {abs(m.advantage) for m in batches[1].members} == {1.0}
    assert [micro.tokens for micro in batches[1].layout] == [14, 14, 14]
    assert (await rebuild_all(lane.log, lane.lane)).identical == 2


async def test_a_holder_that_resumes_finds_the_configuration_that_was_in_force(lane: LaneWorld) -> None:
    await lane.configure()
    config = await lane.configure(groups_per_batch=1)
    await lane.group()
    assert len(await assembled(lane, 1)) == 1
    await lane.group()
    assert [batch.config_offset for batch in await assembled(lane, 2)] == [config, config]


async def test_production_is_batched_only_while_a_grant_stands(lane: LaneWorld) -> None:
    """Guarantee 8: the batch names the offset of subjects.v1 up to which consent was read."""
    ada = f"ada-{lane.lane}"
    await lane.configure(groups_per_batch=1)

    async def production(count: int) -> tuple[int, BatchAssembled]:
        """A group of Ada's and one of our own; returns hers and the batch that decided on it."""
        offset = await lane.group(origin="production", subject=ada)
        await lane.group()
        batches = await assembled(lane, count)
        return offset, next(batch for batch in batches if offset in batch.groups or offset in reasons(batch))

    asked, batch = await production(1)
    assert reasons(batch) == {asked: "consent"}
    granted = await lane.grant(ada)
    offset, batch = await production(3)
    assert batch.groups == [offset] and batch.subjects_offset == granted + 1
    assert {member.subject for member in batch.members} == {ada}
    withdrawn = await lane.withdraw(ada)
    asked, batch = await production(4)
    assert reasons(batch) == {asked: "consent"} and batch.subjects_offset == withdrawn + 1
    assert str(await rebuild_all(lane.log, lane.lane)) == "4/4 byte-identical", "judged by the consents of their time"


async def test_an_evaluation_is_never_batched(lane: LaneWorld) -> None:
    await lane.configure(groups_per_batch=1)
    evaluated = await lane.group(origin="eval")
    own = await lane.group()
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == ([own], {evaluated: "origin"})


# -- guarantee 5: rebuilt byte for byte ---------------------------------------------------------------------------


async def test_what_a_batch_recorded_wrongly_is_named_leaf_by_leaf(lane: LaneWorld) -> None:
    await lane.configure()
    for _ in range(4):
        await lane.group()
    batches = await assembled(lane, 2)
    assert str(await rebuild_all(lane.log, lane.lane)) == "2/2 byte-identical"

    first, victim, *rest = batches[0].members
    flipped = msgspec.structs.replace(victim, leaf=victim.leaf[:-1] + ("0" if victim.leaf[-1] != "0" else "1"))
    leaves = [first.leaf, flipped.leaf, *(member.leaf for member in rest)]
    forged = msgspec.structs.replace(
        batches[0], members=[first, flipped, *rest], merkle_root=merkle.root(leaves), batch_id="forged"
    )
    await lane.log.append("batches.v1", lane.lane, an_event(forged))
    report = await rebuild_all(lane.log, lane.lane)
    assert str(report) == "2/3 byte-identical"
    assert [verdict.identical for verdict in report.batches] == [True, True, False]
    mismatched = [session for session, verdict in report.batches[2].leaves.items() if verdict != "rebuilt"]
    assert mismatched == [victim.session_id]
    assert report.batches[2].leaves[victim.session_id] == "mismatch"


async def test_a_batch_that_left_a_member_out_is_found_out(lane: LaneWorld) -> None:
    """The leaves of the members it lists are right; only assembling its groups again shows the one that is missing."""
    await lane.configure()
    await lane.group()
    await lane.group()
    (batch,) = await assembled(lane, 1)
    kept = batch.members[:3]
    short = msgspec.structs.replace(batch, members=kept, merkle_root=merkle.root([m.leaf for m in kept]))
    verdict = await verify_batch(lane.log, short, after=-1)
    assert set(verdict.leaves.values()) == {"rebuilt"} and not verdict.reassembled and not verdict.identical
    assert (await verify_batch(lane.log, batch, after=-1)).identical


async def test_rebuilding_needs_nothing_but_the_log(lane: LaneWorld, kafka_config: KafkaConfig) -> None:
    """Guarantee 2: another process with a connection of its own gets the same."""
    await lane.configure()
    await lane.group()
    await lane.group()
    await assembled(lane, 1)
    async with EventLog(kafka_config) as elsewhere:
        assert str(await rebuild_all(elsewhere, lane.lane)) == "1/1 byte-identical"


# -- a group is batched at most once, whatever lies on groups.v1 --------------------------------------------------


async def written_group(lane: LaneWorld, name: str) -> list[SealedMember]:
    """A group's sessions and rewards, its opening and its seal still to be written."""
    sessions = [await lane.session(f"{name}.{at}", [turn(0, 0, [1, 2], [3 + at, 4])]) for at in range(2)]
    return [await lane.member(session, name, float(at)) for at, session in enumerate(sessions)]


async def test_a_group_is_batched_once_however_often_and_by_whom_it_is_sealed(lane: LaneWorld) -> None:
    """A second seal in the same batch, after the batch, and after a restart; replay makes the very same batches."""
    await lane.configure()
    names = [f"{lane.lane}.n{number}" for number in range(4)]
    members = {name: await written_group(lane, name) for name in names}
    first, second, third, fourth = [await lane.end(name, members[name]) for name in names[:1]] + [
        await lane.seal(names[0], members[names[0]]),
        await lane.end(names[1], members[names[1]]),
        await lane.seal(names[1], members[names[1]]),
    ]
    assert [batch.groups for batch in await assembled(lane, 1)] == [[first, third]]
    await lane.seal(names[0], members[names[0]])  # after the batch, before the next holder starts
    await lane.open(names[0], [member.session_id for member in members[names[0]]])
    await lane.seal(names[0], members[names[0]])
    later = [await lane.end(name, members[name]) for name in names[2:]]
    batches = await assembled(lane, 2)
    assert [batch.groups for batch in batches] == [[first, third], later]
    assert second not in batches[0].groups and fourth not in batches[1].groups
    assert [dropped for batch in batches for dropped in batch.dropped] == []
    assert members_once(batches)
    assert str(await rebuild_all(lane.log, lane.lane)) == "2/2 byte-identical"
    alone = await verify_batch(lane.log, batches[1], after=batches[0].input_offset)
    assert alone.identical, "a batch verified alone is judged by the whole lane before it"


async def test_a_seal_without_an_opening_or_of_other_members_is_not_batched(lane: LaneWorld) -> None:
    await lane.configure()
    names = [f"{lane.lane}.f{number}" for number in range(3)]
    members = {name: await written_group(lane, name) for name in names}
    unopened = await lane.seal(names[0], members[names[0]])
    await lane.open(names[1], [member.session_id for member in members[names[1]]])
    foreign = [await lane.seal(names[1], members[names[2]]), await lane.seal(names[1], members[names[1]][:1])]
    genuine = [await lane.seal(names[1], members[names[1]]), await lane.end(names[2], members[names[2]])]
    (batch,) = await assembled(lane, 1)
    assert batch.groups == genuine and not {unopened, *foreign} & {*batch.groups, *reasons(batch)}
    assert str(await rebuild_all(lane.log, lane.lane)) == "1/1 byte-identical"


async def test_a_session_is_trained_for_the_group_that_its_reward_names(lane: LaneWorld) -> None:
    """A group that was opened on another group's sessions has no rewards of its own."""
    await lane.configure()
    members = await written_group(lane, f"{lane.lane}.own")
    borrowed = await lane.end(f"{lane.lane}.borrower", members)
    kept = [await lane.end(f"{lane.lane}.own", members), await lane.group()]
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == (kept, {borrowed: "infrastructure"})
    assert members_once([batch])
    assert str(await rebuild_all(lane.log, lane.lane)) == "1/1 byte-identical"


async def test_a_seal_that_names_records_past_the_end_drops_its_group_and_the_lane_goes_on(lane: LaneWorld) -> None:
    """Guarantee 12: nobody waits for records that were never written."""
    await lane.configure()
    name = f"{lane.lane}.past"
    members = await written_group(lane, name)
    past = [msgspec.structs.replace(member, first_offset=10**9, last_offset=10**9 + 5) for member in members]
    bad = await lane.end(name, past)
    elsewhere = msgspec.structs.replace(members[0], partition=10**6, reward=RecordRef("rewards.v1", 9, 10**9))
    bad_place = await lane.end(f"{name}.2", [msgspec.structs.replace(elsewhere, session_id="x"), members[1]])
    good = [await lane.group() for _ in range(2)]
    (batch,) = await assembled(lane, 1)
    assert (batch.groups, reasons(batch)) == (good, {bad: "undecodable", bad_place: "infrastructure"})
