"""Which versions stay: the settings, and the one rule by which a record on weights.v1 takes some."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from odradek.actors.controller.core import Controller
from odradek.actors.trainer.checkpoint import Checkpoints, TrainerState, fetch_weights
from odradek.actors.trainer.errors import PrunedVersionError
from odradek.actors.trainer.manifest import Manifest, Origin, Place
from odradek.actors.trainer.pruning import Keep, bases, unshared
from odradek.actors.trainer.testing import tiny_policy
from odradek.streams.blobs import MemoryStore
from odradek.streams.events.groups import GroupDiscarded, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.events.weights import VersionPinned, VersionPruned, VersionPublished, VersionRolledBack
from odradek.streams.replay.lineage import Versions

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=1, attempts=2, max_staleness=1)


@pytest.mark.parametrize(
    ("newest", "every", "due"),
    [
        (3, 4, [1, 2, 3, 5, 6, 7]),
        (2, 0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (50, 4, []),
        (1, 1, []),
        (0, 4, []),
    ],
)
def test_the_newest_and_every_nth_stay(newest: int, every: int, due: list[int]) -> None:
    assert Keep(newest=newest, every=every).due(range(11)) == due


def published(version: int, **changes: Any) -> VersionPublished:
    return VersionPublished(
        policy="demo", version=version, manifest_key=f"i/demo/l/{version}", manifest_sha256="", **changes
    )


def pruned(*versions: int) -> VersionPruned:
    return VersionPruned(policy="demo", versions=list(versions))


FIVE = [published(version) for version in range(5)]
CASES: list[tuple[str, Sequence[Any], set[int]]] = [
    ("what it names", [*FIVE, pruned(0, 1)], {0, 1}),
    ("never the newest", [*FIVE, pruned(3, 4)], {3}),
    ("not what nobody published", [*FIVE, pruned(1, 9)], {1}),
    ("not a version pinned before", [*FIVE, VersionPinned(policy="demo", version=1), pruned(0, 1)], {0}),
    ("not one rolled back to before", [*FIVE, VersionRolledBack(policy="demo", to_version=2), pruned(1, 2)], {1}),
    ("a pin that comes later is void", [*FIVE, pruned(1), VersionPinned(policy="demo", version=1), pruned(2)], {1, 2}),
    ("a number published anew is there", [*FIVE, pruned(1, 2), published(1, restored=True)], set()),
]


@pytest.mark.parametrize(("what", "records", "gone"), CASES)
def test_a_record_takes_by_the_order_of_the_log_and_everybody_agrees(
    what: str, records: Sequence[Any], gone: set[int]
) -> None:
    """The command line's fold and the controller's: what is served is never what cannot be loaded."""
    shown, core = Versions("demo"), Controller(LANE)
    for record in records:
        shown.apply(record, 0)
        core.on_weights(record)
    weights = core.weights["demo"]
    assert shown.pruned == weights.pruned == gone, what
    assert weights.current not in gone


def test_a_task_pinned_on_a_pruned_version_is_refused_by_name() -> None:
    """It would be opened, and its sessions would ask for weights that nobody has."""
    core = Controller(LANE)
    for record in [*FIVE, pruned(1)]:
        core.on_weights(record)
    tests = HiddenTests(module="m", function="f", cases=[HiddenCase(id="a", args=[1], want=1)], fail_to_pass=["a"])
    task = TaskPublished(
        task_id="t", instruction="x", files={"m.py": ""}, tests=tests, purpose="eval", policy_version=1
    )
    core.on_task(RecordRef("tasks.v1", 0, 0), task)
    (refused,) = [*core.decide(0, 100, []), *core.decide(0, 100, [])]
    assert isinstance(refused, GroupDiscarded)
    assert (refused.reason, refused.detail) == ("policy_version", "version 1 of policy demo was pruned")


async def test_a_reader_of_a_pruned_version_is_told_its_name() -> None:
    """Not that an object is missing: nobody lost anything."""
    checkpoints = Checkpoints(MemoryStore(), Place("i", "demo", "main-0"))
    done = await checkpoints.publish(TrainerState.begin(tiny_policy(), seed=0), Origin(parent=None), "numerics")
    await checkpoints.mark_pruned(0)
    await checkpoints.weights(done.manifest)  # as long as it is there
    for shard in done.manifest.shards:
        await checkpoints.store.remove(shard.key)
    with pytest.raises(PrunedVersionError, match=r"version 0 \(i/demo/main-0/0\) was pruned") as refused:
        await fetch_weights(checkpoints.store, done.key, done.sha256)
    again = pickle.loads(pickle.dumps(refused.value))
    assert (type(again), str(again)) == (PrunedVersionError, str(refused.value))
    assert await checkpoints.pruned() == [0]


async def test_shards_are_shared_within_a_place_and_no_further() -> None:
    """Two deployments on one bucket begin with the same weights; what one prunes is not the other's."""
    store = MemoryStore()
    mine, theirs = (Checkpoints(store, Place(name, "demo", "main-0")) for name in ("mine", "theirs"))
    for checkpoints in (mine, theirs):
        await checkpoints.publish(TrainerState.begin(tiny_policy(), seed=0), Origin(parent=None), "numerics")
    keys = [{shard.key for shard in (await one.manifest(0)).shards} for one in (mine, theirs)]
    assert not keys[0] & keys[1]


async def versions(newest: int, full_every: int, *, learns: bool) -> dict[int, Manifest]:
    """Manifests as a trainer publishes them."""
    checkpoints = Checkpoints(MemoryStore(), Place("i", "demo", "main-0"), full_every)
    state, parent, found = TrainerState.begin(tiny_policy(), seed=0), None, {}
    for version in range(newest + 1):
        state.version = version
        with torch.no_grad():
            state.policy.final_norm[version] += float(learns)
        done = await checkpoints.publish(state, Origin(parent=version - 1 if version else None), "numerics", parent)
        parent, found[version] = done.weights, done.manifest
    return found


async def test_what_a_kept_delta_is_made_on_is_needed_down_to_a_whole_version() -> None:
    """Versions 0, 4 and 8 are whole, the others deltas on the one before."""
    manifests = await versions(9, 4, learns=True)
    assert [manifests[v].delta is None for v in range(10)] == [v % 4 == 0 for v in range(10)]
    assert bases(manifests, [7, 9]) == {4, 5, 6, 8}
    assert bases(manifests, [8]) == set()


async def test_an_object_that_a_kept_manifest_names_is_never_removed() -> None:
    """A trainer that learns nothing: all versions have the same objects."""
    still = await versions(3, 1, learns=False)
    assert unshared([still[0], still[1]], [still[2]]) == []
    assert len(unshared(still.values(), [])) == 2
    moving = await versions(3, 1, learns=True)
    trainer = {shard.key for shard in moving[0].shards} & {shard.key for shard in moving[1].shards}
    gone = unshared([moving[0]], [moving[1]])
    assert gone == sorted({shard.key for shard in moving[0].shards} - trainer)
    old = msgspec.structs.replace(
        moving[0], shards=[msgspec.structs.replace(moving[0].shards[0], key="blobs/shared/x")]
    )
    assert unshared([old], []) == [], "not in the version's own place: somebody else's too"
