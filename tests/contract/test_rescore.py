"""`odradek replay rescore` on a real broker and store: another grader's word beside the old one, and training on it."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.cli import Cli
from support.lane_world import LaneWorld
from support.log_copy import Stored, copied
from support.rescored import faults_of
from support.training_world import TRAINING, TrainingWorld

from odradek.actors.reward import rescore as rescore_module
from odradek.actors.reward.errors import GraderCouldNotRun, NotRescored
from odradek.actors.reward.grader import Grade
from odradek.actors.reward.graders import Case, Grader
from odradek.actors.reward.rescore import Rescored, rescore
from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.manifest import Place
from odradek.actors.trainer.retrain import retrain
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import Terminal
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardRevised
from odradek.streams.log import EventLog
from odradek.streams.replay import reseal as reseal_module
from odradek.streams.replay.branch import branch_point
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.replay.reseal import new_lane, reseal, seals_from
from odradek.streams.replay.select import bodies

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    tiny_policy(seed=3).save_hf(folder)
    return folder


@pytest.fixture(scope="module")
def config(kafka_bootstrap: str, s3_config: dict[str, str], warm_start: Path) -> KafkaConfig:
    """A deployment whose history all tests share, because none of them may change it: three groups of three attempts,
    each a batch of its own, all trained; then a flat one that no batch keeps."""
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")

    async def lived() -> None:
        await ensure_topics(made)
        async with opened(made, s3_config, warm_start) as world:
            await world.lane.configure()
            task = await world.lane.task(policy=world.lane.policy)
            for number in range(3):
                await world.lane.group([1.0, 0.0, 0.5], version=number, task=task)
            await world.lane.group([1.0, 1.0, 1.0], version=3, task=task)
            await world.assemble(3, groups=0)
            await world.train(3)

    asyncio.run(lived())
    return made


@asynccontextmanager
async def opened(config: KafkaConfig, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    store = S3Store(S3Config(**s3_config))
    async with EventLog(config) as log:
        lane = LaneWorld(log, {"groups_per_batch": 1, "attempts": 3, "training": TRAINING}, lane="main-0")
        yield TrainingWorld(lane, store, warm_start, config.prefix)
    store.close()


@pytest.fixture
async def world(config: KafkaConfig, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    async with opened(config, s3_config, warm_start) as made:
        yield made


@pytest.fixture
def grader() -> Grader:
    """One that no other test has asked."""
    return Grader("opposite", uuid.uuid4().hex, False, opposite)


async def opposite(case: Case, _factory: object) -> Grade:
    """What was good is bad. The flat group gets a spread: its last attempt is the worst."""
    total = 1.0 - case.verdict.total
    last = case.verdict.session_id.endswith(".2")
    return Grade({"solved": float(total > 0 or last)}, total + 0.25 * last)


async def scored(world: TrainingWorld, grader: Grader) -> Rescored:
    seals = await seals_from(world.lane.log, world.lane.lane, 0)
    return await rescore(world.lane.log, grader, seals, "a second look")


async def trained(world: TrainingWorld, grader: Grader, lane: str, version: int = 0) -> list[BatchAssembled]:
    """As `--train --from VERSION --into LANE` does; the policy is the lane's name."""
    log = world.lane.log
    parent = await branch_point(log, world.lane.policy, str(version))
    seals = await seals_from(log, world.lane.lane, version)
    done = await rescore(log, grader, seals, "")
    config = new_lane(world.lane.configuration(), lane, lane, parent)
    last = await reseal(log, config, world.lane.lane, seals, done.revised)
    return await asyncio.wait_for(retrain(log, place(world, lane), config, world.warm_start, last), 200)


def place(world: TrainingWorld, lane: str) -> Checkpoints:
    return world.checkpoints.at(Place(world.incarnation, lane, lane))


async def of_topics(world: TrainingWorld, *names: str) -> list[Stored]:
    """What lies on these topics, in the partitions of the world's own lane."""
    return [one for one in await copied(world.lane.log) if one.topic in names and one.partition == 0]


async def test_history_is_scored_again_beside_the_old_verdicts_and_past_batches_stay_what_they_were(
    world: TrainingWorld, grader: Grader
) -> None:
    before = await copied(world.lane.log)
    done = await scored(world, grader)
    assert (len(done.revised), done.appended, done.changed, done.unfit) == (12, 12, 12, {})
    said = [body async for body in bodies(world.lane.log, "rewards.v1") if isinstance(body, RewardRevised)]
    revised = [body for body in said if body.grader_version == grader.version]
    assert {body.session_id for body in revised} == set(done.revised)
    for body in revised:
        assert body.revises is not None and body.reason == "a second look" and body.sampled_tokens == 4
        stood = (await world.lane.log.read_ref(body.revises)).event.body
        assert (stood.session_id, stood.partition, stood.last_offset) == (
            body.session_id, body.partition, body.last_offset,
        )  # fmt: skip
    after = await copied(world.lane.log)
    kept = [one for one in before if not one.is_end]
    assert [one for one in after if one in kept] == kept, "nothing that was is changed"
    assert {one.topic for one in after if one not in before} == {"rewards.v1"}
    report = await rebuild_all(world.lane.log, world.lane.lane)
    assert (report.identical, len(report.batches)) == (3, 3)


async def test_what_a_grader_version_has_said_is_not_asked_again(world: TrainingWorld, grader: Grader) -> None:
    first = await scored(world, grader)
    asked: list[str] = []

    async def other(case: Case, _factory: object) -> Grade:
        asked.append(case.verdict.session_id)
        return Grade({"solved": 0.0}, 0.0)

    again = await scored(world, Grader("opposite", grader.version, False, other))
    assert (again.appended, asked, again.revised, again.changed) == (0, [], first.revised, first.changed)
    await scored(world, Grader("opposite", f"{grader.version}.2", False, other))
    assert len(asked) == 12, "another version is another grader"


async def test_a_fault_of_ours_ends_the_run_and_the_next_one_goes_on_where_it_was(world: TrainingWorld) -> None:
    """Guarantee 11: a grader that could not run is no verdict."""
    victim, tries = "main-0.g1.1", 0

    async def flaky(case: Case, factory: object) -> Grade:
        nonlocal tries
        tries += case.verdict.session_id == victim
        if case.verdict.session_id == victim and tries <= 4:
            raise GraderCouldNotRun("no sandbox")
        return await opposite(case, factory)

    grader = Grader("flaky", "1", False, flaky)
    with pytest.raises(NotRescored, match=f"1 sessions, first session {victim}: no sandbox"):
        await scored(world, grader)
    done = await scored(world, grader)
    assert (tries, done.appended, len(done.revised)) == (5, 1, 12)


async def test_a_session_that_a_grader_can_never_judge_stays_out_of_its_group_s_mean(world: TrainingWorld) -> None:
    async def picky(case: Case, factory: object) -> Grade:
        if case.verdict.session_id == "main-0.g0.2":
            raise GraderCouldNotRun("not for me", retryable=False)
        return await opposite(case, factory)

    log, seals = world.lane.log, await seals_from(world.lane.log, world.lane.lane, 0)
    done = await rescore(log, Grader("picky", "1", False, picky), seals, "")
    assert done.unfit == {"main-0.g0.2": "not for me"}
    parent = await branch_point(log, world.lane.policy, "0")
    config = new_lane(world.lane.configuration(), "picked-2", "picked-2", parent)
    last = await reseal(log, config, world.lane.lane, seals, done.revised)
    first, *_ = await retrain(log, place(world, "picked-2"), config, world.warm_start, last)
    assert {m.session_id: m.advantage for m in first.members} == {"main-0.g0.0": -0.5, "main-0.g0.1": 0.5}


async def resealed(world: TrainingWorld, grader: Grader, lane: str) -> list[str]:
    """Scored again and sealed in a lane of its own; what is wrong with that."""
    log = world.lane.log
    seals, done = await seals_from(log, world.lane.lane, 0), await scored(world, grader)
    config = new_lane(world.lane.configuration(), lane, lane, await branch_point(log, world.lane.policy, "0"))
    await reseal(log, config, world.lane.lane, seals, done.revised)
    return await faults_of(log, world.lane.lane, lane, done.unfit)


async def test_a_rescored_lane_that_keeps_an_old_verdict_is_caught(
    world: TrainingWorld, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: of each group the first member is trained on what the old grader said."""
    assert await resealed(world, grader, "sound-2") == []

    def old(lane: str, source: str, offset: int, seal: GroupSealed, revised: Mapping[str, RecordRef]) -> GroupSealed:
        made = sound(lane, source, offset, seal, revised)
        return msgspec.structs.replace(made, members=[seal.members[0], *made.members[1:]])

    sound = reseal_module._sealed
    monkeypatch.setattr(reseal_module, "_sealed", old)
    assert await resealed(world, grader, "stale-2") == [
        f"session main-0.g{number}.0 has a verdict that is not the later grader's on it" for number in range(4)
    ]


async def test_a_rescore_that_skips_a_session_is_caught(
    world: TrainingWorld, grader: Grader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: the last session of what is scored together is not asked about, and nobody is told."""
    chunk = rescore_module._chunk

    async def hasty(log: EventLog, by: Grader, members: list[SealedMember], *rest: Any) -> None:
        await chunk(log, by, members[:-1], *rest)

    monkeypatch.setattr(rescore_module, "_chunk", hasty)
    assert await resealed(world, grader, "hasty-3") == ["session main-0.g3.2 was skipped"]


async def test_two_rescored_lanes_give_the_same_batches_and_the_same_weights(
    world: TrainingWorld, grader: Grader
) -> None:
    one, two = [await trained(world, grader, lane) for lane in ("again-2", "another-3")]
    assert [batch.ordinal for batch in one] == [0, 1, 2, 3], "the flat group has a spread now"
    same = ("ordinal", "members", "layout", "merkle_root", "subjects_offset")
    assert [[getattr(b, name) for name in same] for b in one] == [[getattr(b, name) for name in same] for b in two]
    digests = [
        [(await place(world, lane).manifest(version)).weights_digest for version in range(5)]
        for lane in ("again-2", "another-3")
    ]
    assert digests[0] == digests[1] and len(set(digests[0])) == 5
    for lane in ("again-2", "another-3"):
        report = await rebuild_all(world.lane.log, lane)
        assert (report.identical, len(report.batches)) == (4, 4)
    old = [batch for _, batch in await world.lane.batches()]
    assert [m.total for m in one[0].members] == [0.0, 1.0, 0.75] != [m.total for m in old[0].members]
    assert [m.session_id for m in one[0].members] == [m.session_id for m in old[0].members]


async def test_training_again_begins_with_the_version_asked_for_and_leaves_the_parent_alone(
    world: TrainingWorld, grader: Grader
) -> None:
    topics = ("groups.v1", "batches.v1")
    history, had = await of_topics(world, *topics), [await world.bits(version) for version in range(4)]
    keys = await world.store.list(world.checkpoints.place.prefix)
    batches = await trained(world, grader, "later-2", version=1)
    assert [batch.ordinal for batch in batches] == [1, 2, 3]
    assert [m.newest_version for batch in batches for m in batch.members] == [1] * 3 + [2] * 3 + [3] * 3
    assert all(m.masked_stale_tokens == 0 for batch in batches for m in batch.members)
    first = await place(world, "later-2").manifest(1)
    assert (first.weights_digest, first.origin.copied_from) == (had[1][0], world.checkpoints.place.key(1))
    assert first.optimiser_updates == (await world.checkpoints.manifest(1)).optimiser_updates > 0
    assert await of_topics(world, *topics) == history
    assert await world.store.list(world.checkpoints.place.prefix) == keys
    assert [await world.bits(version) for version in range(4)] == had
    assert [v.version for v in await world.lane.versions()] == [0, 1, 2, 3], "the parent's policy has no other versions"


async def test_writing_the_lane_twice_writes_it_once_and_another_lane_of_its_name_is_refused(
    world: TrainingWorld, grader: Grader
) -> None:
    log, done = world.lane.log, await scored(world, grader)
    parent = await branch_point(log, world.lane.policy, "0")
    seals = await seals_from(log, world.lane.lane, 0)
    config = new_lane(world.lane.configuration(), "twice-2", "twice-2", parent)
    half = await reseal(log, config, world.lane.lane, seals[:2], done.revised)
    whole = await reseal(log, config, world.lane.lane, seals, done.revised)
    end = await log.stable_end("groups.v1", 2)
    assert half < whole == await reseal(log, config, world.lane.lane, seals, done.revised)
    assert await log.stable_end("groups.v1", 2) == end
    written = [body async for body in bodies(log, "groups.v1") if body.lane == "twice-2"]
    assert len([body for body in written if isinstance(body, LaneConfigured)]) == 1 and len(written) == 9
    with pytest.raises(Terminal, match="lane twice-2 is on the log already"):
        await reseal(log, config, world.lane.lane, seals, {})
    for name in ("main-0", "again-0", "again-1"):
        with pytest.raises(Terminal, match="main line's partitions"):
            new_lane(world.lane.configuration(), name, "other", parent)
    with pytest.raises(Terminal, match="a branch is a new policy id"):
        new_lane(world.lane.configuration(), "again-2", world.lane.policy, parent)


async def test_a_branch_begins_at_a_version_or_at_any_offset_that_says_what_was_trained(world: TrainingWorld) -> None:
    log, policy = world.lane.log, world.lane.policy
    seals = [offset for offset, _ in await seals_from(log, world.lane.lane, 0)]
    steps = [ref.offset for ref, _ in await world.lane.batches()]

    async def version(text: str) -> int:
        return (await branch_point(log, policy, text)).version

    assert [await version(str(number)) for number in range(4)] == [0, 1, 2, 3]
    assert [await version(f"groups.v1/0@{offset}") for offset in (0, *seals)] == [0, 1, 2, 3, 3]
    assert [await version(f"batches.v1/0@{offset}") for offset in (steps[0], steps[2], 10**6)] == [0, 0, 3]
    assert await version("weights.v1/0@0") == 0
    for wrong in ("4", "sessions.v1/0@3", "now"):
        with pytest.raises(Terminal):
            await version(wrong)


async def test_the_command_scores_and_trains(
    world: TrainingWorld, s3_config: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    credentials = tmp_path / "keys.json"
    credentials.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    store: list[Any] = ["--data", tmp_path / "none"]
    for name, value in (("endpoint", s3_config["endpoint"]), ("bucket", s3_config["bucket"])):
        store += ["--set", f"s3.{name}={value}"]
    store += ["--set", f"s3.credentials_file={credentials}"]
    cli = Cli(capsys, world.lane.log.config)

    def call(*arguments: object) -> Any:
        return cli("replay", "rescore", *arguments)

    unknown = await asyncio.to_thread(call, "--grader", "conduct@0")
    assert unknown.code == 2 and "there are hidden-tests@" in unknown.err
    first = await asyncio.to_thread(call, "--grader", "conduct@1+1", "--json")
    assert first.code == 0 and (first.json["sessions"], first.json["appended"]) == (12, 12)
    train = ("--grader", "conduct@1+1", "--train", "--from", 1, "--into", "told-2", "--policy", "other")
    done = await asyncio.to_thread(call, *train, "--json", *store)
    assert done.code == 0, done.err
    assert (done.json["appended"], done.json["trained"]["version"]) == (0, 3)
    again = await asyncio.to_thread(call, *train, *store)
    assert again.code == 0 and "lane told-2: 2 batches, policy other is at version 3" in again.out
    before = await world.lane.log.stable_ends(topics.REWARDS.name)
    for wrong in (
        ("--into", "again-2"),
        ("--train", "--from", "9"),
        ("--train", "--into", "again-0"),
        ("--train", "--policy", world.lane.policy),
    ):
        assert (await asyncio.to_thread(call, "--grader", "hidden-tests@2+1", *wrong, *store)).code == 2
    assert await world.lane.log.stable_ends(topics.REWARDS.name) == before, "what is refused has written nothing"
    assert uuid.UUID(next(iter(done.json["trained"]["batches"])))
