"""What a restore gave up is never served, though its version numbers are used again: a replica that starts after the
restore, and one that lived through it (a host that nobody could reach, say).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import eventually

from odradek.actors.inference.serving import ServingActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState
from odradek.actors.trainer.manifest import Origin, Place, decode
from odradek.actors.trainer.testing import tiny_policy
from odradek.kernels.numerics import numerics_id
from odradek.streams import topics
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.weights import CurrentWeights, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

PATIENCE_S = 120.0


class Served:
    """A policy's versions, and the replicas that serve them."""

    def __init__(self, log: EventLog, store: S3Store, deployment: Deployment) -> None:
        self.log, self.store, self.deployment = log, store, deployment
        self.base = uuid.uuid4().hex[:8]
        self.digests: dict[tuple[str, int], str] = {}

    async def publish(self, incarnation: str, version: int, *, seed: int, restored: bool = False) -> CurrentWeights:
        """The version on store and log; what the controller would say to serve it."""
        state = TrainerState.begin(tiny_policy(seed), seed=0)
        state.version = version
        place = Place(f"{self.base}{incarnation}", "p", "main-0")
        published = await Checkpoints(self.store, place).publish(state, Origin(parent=None), numerics_id())
        self.digests[incarnation, version] = published.manifest.weights_digest
        body = VersionPublished(
            policy="p", version=version, manifest_key=published.key, manifest_sha256=published.sha256, restored=restored
        )
        await self.log.append(topics.WEIGHTS.name, "p", an_event(body))
        return CurrentWeights(policy="p", version=version, manifest_key=published.key, manifest_sha256=published.sha256)

    async def serve(self, current: CurrentWeights) -> None:
        await self.log.append(topics.WEIGHTS_CURRENT.name, "p", an_event(current))

    @contextmanager
    def replica(self) -> Iterator[ServingActor]:
        actor = ServingActor(self.deployment, "inference-0")
        try:
            yield actor
        finally:
            actor._loop.stop()

    async def until_served(self, actor: ServingActor, incarnation: str, version: int) -> None:
        """The replica serves exactly these weights."""

        async def served() -> bool:
            state = await actor.state()
            return bool(state["version"] == version and self.held(actor, version) == self.digests[incarnation, version])

        await eventually(served, f"version {version} of {incarnation or 'the first incarnation'}", PATIENCE_S)

    @staticmethod
    def held(actor: ServingActor, version: int) -> str:
        return str(actor._engine._loop.call(lambda engine: engine.weights.get(version).digest).result(PATIENCE_S))


@pytest.fixture
async def served(fresh_config: KafkaConfig, s3_config: dict[str, str], tmp_path: Path) -> AsyncIterator[Served]:
    tiny_policy(seed=3).save_hf(tmp_path / "warm")
    credentials = tmp_path / "credentials.json"
    credentials.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    deployment = Deployment(
        kafka=fresh_config,
        store=ObjectStoreAddress(
            endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(credentials)
        ),
        lane=LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1),
        policy="p",
        data_dir=str(tmp_path),
        tokenizer_file="",
        warm_start_dir=str(tmp_path / "warm"),
        max_context=128,
    )
    store = S3Store(S3Config(**s3_config))
    async with EventLog(fresh_config) as log:
        yield Served(log, store, deployment)
    store.close()


async def test_weights_that_a_restore_gave_up_are_not_served_under_the_number_that_is_used_again(
    served: Served,
) -> None:
    await served.publish("", 1, seed=1)
    given_up = await served.publish("", 2, seed=2)
    await served.serve(given_up)
    with served.replica() as survivor:
        await served.until_served(survivor, "", 2)
        first = await served.publish("-r1", 1, seed=1, restored=True)
        again = await served.publish("-r1", 2, seed=3)
        await served.serve(again)
        await served.until_served(survivor, "-r1", 2)
        await served.serve(first)
        await served.until_served(survivor, "-r1", 1)
        assert (await survivor.state())["version"] == 1


async def test_a_replica_stays_on_its_weights_at_what_a_newer_release_wrote_and_says_so(served: Served) -> None:
    """What it does not know may be what takes a version back: it serves on, and loads nothing new."""
    await served.serve(await served.publish("", 1, seed=1))
    with served.replica() as replica:
        await served.until_served(replica, "", 1)
        ref = await served.log.append_raw(topics.WEIGHTS.name, b"p", b"\x80", [("ce_type", b"version.moved.v9")])
        await served.serve(await served.publish("", 2, seed=2))

        async def stands_down() -> str:
            return str((await replica.state())["fault"])

        fault = await eventually(stands_down, "the replica to stand down", PATIENCE_S)
        assert "'version.moved.v9'" in fault and fault.endswith(f" at {ref}")
        assert (await replica.state())["version"] == 1


async def test_a_version_that_cannot_be_loaded_is_said_once_and_served_when_it_is_mended(served: Served) -> None:
    """A replica without weights answers and samples nothing: whoever looks must see it, and what to do."""
    current = await served.publish("", 1, seed=1)
    manifest = decode(await served.store.get(current.manifest_key), current.manifest_key)
    shard = manifest.shard("weights").key
    whole = await served.store.get(shard)
    await served.store.remove(shard)
    await served.serve(current)
    with served.replica() as replica:

        async def refused() -> str:
            state = await replica.state()
            assert state["fault"] == "", "it has not stopped for good: who watches it need not either"
            return str(state["refused"])

        fault = await eventually(refused, "the replica to say so", PATIENCE_S)
        assert fault.startswith("version 1 can't be loaded: ") and shard in fault and "odradek restore" in fault
        await served.store.put_if_absent(shard, whole)
        await served.until_served(replica, "", 1)
        assert await refused() == ""

    end = await served.log.stable_end(topics.REPLICAS.name, 0)
    reports = [record.event.body async for record in served.log.read(topics.REPLICAS.name, 0, 0, end)]
    assert [(report.version, report.healthy) for report in reports] == [(1, False), (1, True)]


async def test_a_roll_back_from_a_version_that_cannot_be_loaded_leaves_nothing_refused(served: Served) -> None:
    """The version that was served all along is wanted again: nothing is loaded, and nothing is wrong any more."""
    whole = await served.publish("", 1, seed=1)
    broken = await served.publish("", 2, seed=2)
    await served.store.remove(decode(await served.store.get(broken.manifest_key), "").shard("weights").key)
    await served.serve(whole)
    with served.replica() as replica:

        async def refused() -> str:
            return str((await replica.state())["refused"])

        await served.until_served(replica, "", 1)
        await served.serve(broken)
        await eventually(refused, "the replica to refuse version 2", PATIENCE_S)
        await served.serve(whole)

        async def well() -> bool:
            return not await refused()

        await eventually(well, "the replica to be well again", PATIENCE_S)
        await served.until_served(replica, "", 1)

    end = await served.log.stable_end(topics.REPLICAS.name, 0)
    reports = [record.event.body async for record in served.log.read(topics.REPLICAS.name, 0, 0, end)]
    assert [(report.version, report.healthy) for report in reports] == [(1, True), (2, False), (1, True)]


async def test_a_replica_that_starts_after_a_restore_never_loads_what_was_given_up(served: Served) -> None:
    """weights.current.v1 still names it: the controller has not spoken yet. Its objects may all be there."""
    await served.publish("", 1, seed=1)
    given_up = await served.publish("", 2, seed=2)
    await served.serve(given_up)
    first = await served.publish("-r1", 1, seed=1, restored=True)
    again = await served.publish("-r1", 2, seed=3)
    with served.replica() as replica:

        async def told() -> bool:
            return replica._live and replica._wanted is not None

        await eventually(told, "the replica knowing what to serve", PATIENCE_S)
        assert (await replica.state())["version"] is None
        await served.serve(first)
        await served.until_served(replica, "-r1", 1)
        await served.serve(again)
        await served.until_served(replica, "-r1", 2)
        assert (await replica.state())["loads"] == 2
