"""The trainer loop's promises on a real broker and a real store: killed anywhere, no batch is trained twice or skipped.

Batches are made by the real assembler from groups written by hand; the policy is tiny. A lane that was never disturbed
gives the bits that every disturbed one must give.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.assembly_world import turn
from support.lane_world import LaneWorld, stopped, until
from support.training_world import TRAINING, TrainingWorld

from odradek.actors.policy.hf import to_hf_state
from odradek.actors.trainer.checkpoint import TrainerState
from odradek.actors.trainer.errors import AdoptionError, BatchError
from odradek.actors.trainer.loop import TrainerLoop
from odradek.actors.trainer.manifest import Origin
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams import faults
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import BlobMissing, ProducerFenced, TransactionLost, UnknownEventType
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, event_log, fresh_config, kafka_config

__all__ = ["event_log", "fresh_config", "kafka_config"]
pytestmark = pytest.mark.contract

POINTS = [point for point in faults.POINTS if point.startswith("trainer.")]


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    tiny_policy(seed=3).save_hf(folder)
    return folder


@pytest.fixture
async def world(event_log: EventLog, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    async with a_world(event_log, s3_config, warm_start) as world:
        yield world


@asynccontextmanager
async def a_world(log: EventLog, s3_config: dict[str, str], warm_start: Path) -> AsyncIterator[TrainingWorld]:
    store = S3Store(S3Config(**s3_config))
    lane = LaneWorld(log, {"groups_per_batch": 1, "training": TRAINING})
    await lane.configure()
    yield TrainingWorld(lane, store, warm_start, uuid.uuid4().hex)
    store.close()


class Nth:
    """Dies at the nth time the point is reached."""

    def __init__(self, count: int) -> None:
        self.left = count

    async def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise faults.Killed


async def assert_whole_history(world: TrainingWorld, steps: int) -> None:
    """Guarantee 4 as the log shows it: each batch has one step, each step one version, in one order."""
    batches = await world.lane.batches()
    done, versions = await world.lane.steps(), await world.lane.versions()
    assert [step.step for step in done] == list(range(1, steps + 1))
    assert [(step.batch_id, step.batch_offset) for step in done] == [(b.batch_id, ref.offset) for ref, b in batches]
    assert [version.version for version in versions] == list(range(steps + 1)), "version 0 is published once"
    assert [version.batch_id for version in versions] == ["", *(step.batch_id for step in done)]
    assert [version.parent for version in versions] == [None, *range(steps)]
    assert [version.manifest_sha256 for version in versions[1:]] == [step.manifest_sha256 for step in done]


async def test_version_zero_is_the_warm_start_and_step_n_turns_version_n_minus_one_into_n(world: TrainingWorld) -> None:
    await world.assemble(2)
    loop = await world.train(2)
    await assert_whole_history(world, 2)
    zero = await world.checkpoints.weights(await world.checkpoints.manifest(0))
    assert all(torch.equal(zero.state[name], t) for name, t in to_hf_state(tiny_policy(seed=3)).items())
    digests = [(await world.bits(version))[0] for version in range(3)]
    assert len(set(digests)) == 3, "each step moved the weights"
    assert loop.version == 2


async def test_a_restart_goes_on_after_the_last_committed_step(world: TrainingWorld) -> None:
    await world.assemble(1)
    await world.train(1)
    await world.assemble(1, already=1)
    loop = await world.train(2)
    await assert_whole_history(world, 2)
    assert loop.position > (await world.lane.steps())[-1].batch_offset


async def test_what_a_newer_trainer_wrote_ends_an_older_one_where_it_stands(
    fresh_config: KafkaConfig, s3_config: dict[str, str], warm_start: Path
) -> None:
    """A step of a newer kind passed over would be taken again, from weights that are not the lane's last. On a log of
    its own: every trainer of this one's partition stands still there."""
    async with EventLog(fresh_config) as log, a_world(log, s3_config, warm_start) as world:
        await world.assemble(1)
        await world.train(1)
        name = world.lane.lane.encode()
        ref = await log.append_raw("batches.v1", name, b"\x80", [("ce_type", b"step.taken.v9")], partition=0)
        with pytest.raises(UnknownEventType, match=rf"'step.taken.v9' is unknown .* at {ref}"):
            await asyncio.wait_for(world.loop().run(), 120)


async def test_settings_changed_before_the_first_step_do_not_disown_version_zero(world: TrainingWorld) -> None:
    task = asyncio.create_task(world.loop().run())

    async def published() -> bool:
        return len(await world.lane.versions()) == 1

    await until(task, published)
    await stopped(task)
    await world.lane.configure(training={"minibatches": 1})
    await world.assemble(1)
    await world.train(1)
    await assert_whole_history(world, 1)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_point_the_next_holder_gives_the_same_bits(
    world: TrainingWorld, undisturbed: list[tuple[str, list[tuple[str, str]]]], point: str
) -> None:
    """No batch is trained twice, none is skipped; what a killed step left behind is adopted or made again."""
    await world.assemble(3)
    killed = world.loop()
    with faults.armed(point, Nth(2)), pytest.raises(faults.Killed):
        await asyncio.wait_for(killed.run(), 120)
    steps = [step.step for step in await world.lane.steps()]
    assert killed.version == steps[-1], "it says what the log names, not what it has in hand"
    manifest, sent = await world.manifest(2), await world.lane.written()
    committed = 3 + len(steps)  # three batches and the steps
    match point:
        case "trainer.before_publish":
            assert (steps, manifest, sent) == ([1], None, committed), "step 2 was computed and nothing of it kept"
        case "trainer.after_publish":
            assert (steps, sent) == ([1], committed) and manifest, "version 2 is stored, the log does not know"
        case "trainer.before_commit":
            assert (steps, sent) == ([1], committed + 1) and manifest, "step 2 was on the broker, never committed"
        case _:
            assert (steps, sent) == ([1, 2], committed) and manifest, "step 2 was committed before it died"
    stored = await world.bits(2) if manifest else None

    await world.train(3)
    await assert_whole_history(world, 3)
    assert [await world.bits(version) for version in range(4)] == undisturbed
    assert stored in (None, undisturbed[2])


@pytest.fixture(scope="module")
def undisturbed_cache() -> dict[str, Any]:
    return {}


@pytest.fixture
async def undisturbed(
    event_log: EventLog, s3_config: dict[str, str], warm_start: Path, undisturbed_cache: dict[str, Any]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """The bits of versions 0 to 3 of a lane that nobody killed, with the same tokens and rewards."""
    if "bits" not in undisturbed_cache:
        lane = LaneWorld(event_log, {"groups_per_batch": 1, "training": TRAINING})
        await lane.configure()
        world = TrainingWorld(lane, S3Store(S3Config(**s3_config)), warm_start, uuid.uuid4().hex)
        await world.assemble(3)
        await world.train(3)
        undisturbed_cache["bits"] = [await world.bits(version) for version in range(4)]
        world.store.close()
    bits: list[tuple[str, list[tuple[str, str]]]] = undisturbed_cache["bits"]
    return bits


class HoldAndSpoil:
    """Stands still before the manifest is put, with a result that differs from the successor's."""

    def __init__(self, loop: TrainerLoop) -> None:
        self._loop = loop
        self.reached, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        if self.reached.is_set():
            return  # the successor, in the same process, goes straight through
        self.reached.set()
        await self.release.wait()
        state = self._loop._state
        assert state is not None
        with torch.no_grad():
            next(iter(state.policy.parameters())).add_(1.0)


async def test_of_two_trainers_the_loser_discards_its_result_and_loads_the_winners(world: TrainingWorld) -> None:
    await world.assemble(1)
    loser = world.loop()
    hold = HoldAndSpoil(loser)
    with faults.armed("trainer.before_publish", hold):
        task = asyncio.create_task(loser.run())
        await asyncio.wait_for(hold.reached.wait(), 120)
        assert await world.manifest(1) is None
        await world.train(1)
        winner = await world.manifest(1)
        hold.release.set()
        with pytest.raises((ProducerFenced, TransactionLost)):
            await asyncio.wait_for(task, 120)
    assert winner is not None and await world.manifest(1) == winner, "nothing was overwritten"
    assert loser._weights is not None and loser._weights.digest == winner.weights_digest
    assert loser._state is not None
    mine = to_hf_state(loser._state.policy)
    theirs = await world.checkpoints.weights(winner)
    assert all(torch.equal(mine[name], t) for name, t in theirs.state.items())
    await assert_whole_history(world, 1)


async def test_a_manifest_of_another_batch_stops_the_trainer_and_is_not_overwritten(world: TrainingWorld) -> None:
    await world.assemble(1)
    stranger = TrainerState.begin(tiny_policy(seed=9), seed=0)
    stranger.version = 1
    foreign = Origin(parent=0, batch_id="somebody-elses", input_offset=4711, configuration={})
    await world.checkpoints.publish(stranger, foreign, "elsewhere")
    key = world.checkpoints.place.key(1)
    before = await world.store.get(key)
    with pytest.raises(AdoptionError, match=r"somebody-elses.*Nothing was adopted or overwritten"):
        await asyncio.wait_for(world.loop().run(), 120)
    assert await world.store.get(key) == before
    assert await world.lane.steps() == []
    assert [version.version for version in await world.lane.versions()] == [0]


async def test_members_without_consent_get_zero_weight_and_are_listed(world: TrainingWorld) -> None:
    """Guarantee 8, at the time of the step."""
    ada, ben = f"ada-{world.lane.lane}", f"ben-{world.lane.lane}"
    for subject in (ada, ben):
        await world.lane.grant(subject)
    await world.assemble(1, origin="production", subject=ada)
    await world.assemble(1, already=1, origin="production", subject=ben)
    withdrawn = await world.lane.withdraw(ada)
    await world.train(2)
    first, second = await world.lane.steps()
    (_, batch), _ = await world.lane.batches()
    assert first.left_out == [member.session_id for member in batch.members] and len(first.left_out) == 2
    assert first.subjects_offset == withdrawn + 1
    assert first.metrics["trained_tokens"] == 0
    zero, one, two = [(await world.bits(version))[0] for version in range(3)]
    assert zero == one, "nobody's tokens moved the weights"
    assert second.left_out == [] and two != one and second.metrics["trained_tokens"] > 0


async def test_what_the_step_knew_of_consent_is_logged_even_if_it_changed_before_the_commit(
    world: TrainingWorld,
) -> None:
    """The killed trainer used Ada's tokens under her grant; its weights are adopted, and so is what it knew."""
    ada = f"ada-{world.lane.lane}"
    granted = await world.lane.grant(ada)
    await world.assemble(1, origin="production", subject=ada)
    with faults.armed("trainer.after_publish", Nth(1)), pytest.raises(faults.Killed):
        await asyncio.wait_for(world.loop().run(), 120)
    stored = await world.bits(1)
    await world.lane.withdraw(ada)
    await world.train(1)
    (step,) = await world.lane.steps()
    assert await world.bits(1) == stored
    assert (step.left_out, step.subjects_offset) == ([], granted + 1)


async def test_a_learning_rate_of_zero_changes_no_weight(world: TrainingWorld) -> None:
    await world.lane.configure(training={"optimiser": {"learning_rate": 0.0}})
    await world.assemble(2)
    await world.train(2)
    assert len({(await world.bits(version))[0] for version in range(3)}) == 1
    assert all(step.metrics["trained_tokens"] > 0 for step in await world.lane.steps())
    await assert_whole_history(world, 2)


async def test_a_batch_that_the_log_no_longer_gives_stops_the_trainer_and_names_the_member(
    world: TrainingWorld,
) -> None:
    """Guarantee 5: what is trained is what was recorded."""
    other = LaneWorld(world.lane.log, dict(world.lane.settings))
    await other.configure()
    await TrainingWorld(other, world.store, world.warm_start, uuid.uuid4().hex).assemble(1)
    ((_, batch),) = await other.batches()
    victim = msgspec.structs.replace(batch.members[0], leaf="0" * 64)
    forged = msgspec.structs.replace(
        batch, lane=world.lane.lane, policy=world.lane.policy, members=[victim, *batch.members[1:]]
    )
    await world.lane.log.append("batches.v1", world.lane.lane, an_event(forged))
    with pytest.raises(BatchError, match=rf"{victim.session_id} is mismatch \(1 of 2 members\)"):
        await asyncio.wait_for(world.loop().run(), 120)
    assert await world.lane.steps() == []
    with pytest.raises(BlobMissing):
        await world.store.get(world.checkpoints.place.key(1))


async def test_a_batch_out_of_order_stops_the_trainer(world: TrainingWorld) -> None:
    await world.assemble(1)
    ((_, batch),) = await world.lane.batches()
    await world.train(1)
    again = msgspec.structs.replace(batch, batch_id="again")
    await world.lane.log.append("batches.v1", world.lane.lane, an_event(again))
    with pytest.raises(BatchError, match="ordinal 0, expected 1"):
        await asyncio.wait_for(world.loop().run(), 120)
    assert [step.step for step in await world.lane.steps()] == [1]


async def test_a_step_s_metrics_are_finite_and_its_version_names_its_numerics(world: TrainingWorld) -> None:
    said = [turn(0, 0, [1, 2, 3], [4, 5, 6, 7])]
    await world.assemble(1, turns=said)
    await world.train(1)
    (step,) = await world.lane.steps()
    assert json.loads(json.dumps(step.metrics, allow_nan=False)) == step.metrics
    assert step.metrics["trained_tokens"] == 8
    assert {version.numerics_id for version in await world.lane.versions()} == {
        (await world.checkpoints.manifest(1)).numerics_id
    }
