"""Guarantees 8 and 9 on real services: a person's text is nowhere in plain, and nowhere at all once they were erased.

A lane with a person who is erased (ann), one who is not (ben) and sessions of nobody's; the real assembler, the real
trainer, the real queue of dead letters, real objects. What is asserted is read from Kafka's records as they are stored,
from every object, and through every reader there is.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.assembly_world import turn
from support.lane_world import LaneWorld, until
from support.stored import stored_records
from support.training_world import TRAINING, TrainingWorld

from odradek.actors.trainer.loop import TrainerLoop
from odradek.actors.trainer.testing import tiny_policy
from odradek.infra.cli.exports import ExportedFiles, note
from odradek.streams import faults, topics
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.codec import INLINE_LIMIT, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import GroupConsumer, Retry
from odradek.streams.dlq import DeadLetters
from odradek.streams.envelope import Record, event_id
from odradek.streams.errors import KeyUnavailable, SubjectErased
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    FileChange,
    MessageReceived,
    SessionCompleted,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
    WorkspaceDelta,
)
from odradek.streams.events.subjects import ErasureDone, ErasureRequested
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.privacy.erasure import Erasure
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.report import ErasureReport
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.replay.export import export
from odradek.streams.replay.formats import JsonlWriter, ParquetWriter
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.replay.select import Filter, bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

MARKER = f"the-marker-{uuid.uuid4().hex}"
TOKENS = [ord(letter) % 60 for letter in MARKER]
POINTS = [point for point in faults.POINTS if point.startswith("erasure.")]


@dataclass
class PrivateWorld:
    """A deployment with a key store, and a lane in it."""

    log: EventLog
    lane: LaneWorld
    blobs: BlobStore
    data: Path

    @property
    def ring(self) -> KeyRing:
        """As a process of its own has it."""
        return KeyRing(KeyFiles(self.data / "keys"))

    def erasure(self, *local: Any) -> Erasure:
        return Erasure(self.log, self.blobs, local)

    async def said(self, subject: str, session_id: str) -> None:
        """A session that holds the marker wherever a session can hold something, with feedback on it."""
        meta = Meta(origin="production", subject=subject)
        put = self.lane._append
        first = await put("sessions.v1", session_id, SessionOpened(
            session_id=session_id, policy=self.lane.policy, files={"a.txt": MARKER.encode()}, setup=[f"echo {MARKER}"],
        ), meta)  # fmt: skip
        big = await self.blobs.put(MARKER.encode() * 100, subject=subject)
        changes = [FileChange(path=MARKER, kind="file", content=MARKER.encode(), ref=big)]
        bodies: list[Any] = [
            MessageReceived(message_id="0", text=MARKER),
            turn(0, 0, TOKENS, TOKENS),
            ToolRequested(call_id="0.0", turn=0, index=0, name="write", arguments={"text": MARKER}, effect="workspace"),
            ToolCompleted(call_id="0.0", turn=0, index=0, text=MARKER, delta=WorkspaceDelta(changes=changes)),
            SessionCompleted(reason="done", first_offset=first.offset, usage=Usage()),
        ]
        for seq, body in enumerate(bodies):
            await put("sessions.v1", session_id, body, Meta(
                origin="production", subject=subject, epoch=first.offset, seq=seq,
            ))  # fmt: skip
        await put("feedback.v1", session_id, FeedbackGiven(
            session_id=session_id, verdict="accepted", comment=MARKER
        ), meta)  # fmt: skip

    async def dead_letter(self, session_id: str) -> None:
        """A consumer fails on the session's messages, and its error quotes what it could not handle."""

        async def handler(record: Record) -> None:
            body = record.event.body
            if record.key == session_id and isinstance(body, MessageReceived):
                raise ValueError(f"cannot handle {body.text}")

        name = f"consumer-{uuid.uuid4().hex[:6]}"
        consumer = GroupConsumer(self.log, name, ["sessions.v1"], handler, retry=Retry(attempts=1))
        task = asyncio.create_task(consumer.run())
        letters = DeadLetters(self.log)

        async def arrived() -> bool:
            return bool(await letters.letters(name))

        try:
            await until(task, arrived)
        finally:
            consumer.stop()
            await task


@pytest.fixture
async def world(
    fresh_config: KafkaConfig, s3_config: dict[str, str], s3_prefix: str, tmp_path: Path
) -> AsyncIterator[PrivateWorld]:
    store, ring = S3Store(S3Config(**s3_config)), KeyRing(KeyFiles(tmp_path / "keys"))
    blobs = BlobStore(store, prefix=s3_prefix, keys=ring)
    async with EventLog(fresh_config, blobs, ring) as log:
        lane = LaneWorld(log, {"groups_per_batch": 1, "training": TRAINING})
        await lane.configure()
        yield PrivateWorld(log, lane, blobs, tmp_path)
    store.close()


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "start"
    tiny_policy(seed=3).save_hf(folder)
    return folder


# -- what is stored ---------------------------------------------------------------------------------------------------


async def plain_places(world: PrivateWorld) -> list[str]:
    """Where the marker lies readable: as text or as tokens, on the log, in objects, in the data folder."""
    needles = (MARKER.encode(), i32(TOKENS))
    found = [place async for place, raw in stored_records(world.log.config) if any(n in raw for n in needles)]
    for key in await world.blobs.store.list(world.blobs._prefix):
        data = await world.blobs.store.get(key)
        found += [f"object {key}"] if any(n in data for n in needles) else []
    for path in world.data.rglob("*"):
        found += [f"file {path}"] if path.is_file() and any(n in path.read_bytes() for n in needles) else []
    return found


async def read_by_everybody(world: PrivateWorld) -> str:
    """All that any reader of the log can show, dead letters and claim checks included."""
    shown: list[str] = []
    async with EventLog(world.log.config, world.blobs, world.ring) as log:
        for topic in topics.ALL:
            for number, end in (await log.stable_ends(topic.name)).items():
                async for record in log.read(topic.name, number, 0, end):
                    if topic is topics.DLQ:
                        continue
                    body = record.event.body
                    shown += [repr(body), repr(record.event.meta)]
                    if isinstance(body, TurnSampled) and i32(TOKENS) in body.completion:
                        shown.append(MARKER)
        letters = DeadLetters(log)
        for letter in await letters.letters():
            (record,) = await log._poller.redeemed([letter.record()])
            shown += [repr(letter), repr(record.event.body)]
    return "\n".join(shown)


def states(report: ErasureReport) -> dict[str, str]:
    return {store.store: store.state for store in report.stores}


async def kinds_on(world: PrivateWorld, kind: type) -> list[Any]:
    return [body async for body in bodies(world.log, "subjects.v1") if isinstance(body, kind)]


# -- guarantee 9 ------------------------------------------------------------------------------------------------------


async def test_case_cortex_366_no_store_yields_the_text_of_an_erased_subject(world: PrivateWorld) -> None:
    """cdeust/Cortex #366: a subject present in events, blob, batch and dead letters; each store reports for itself."""
    lane, ann, ben = world.lane, "ann", "ben"
    for subject in (ann, ben):
        await lane.grant(subject)
        await world.said(subject, f"{lane.lane}.{subject}")
    await world.dead_letter(f"{lane.lane}.{ann}")
    large = ToolCompleted(call_id="9.9", turn=9, index=9, text=MARKER * (INLINE_LIMIT // 20))
    meta = Meta(origin="production", subject=ann)
    await lane._append("sessions.v1", f"{lane.lane}.{ann}", large, meta)
    assert await plain_places(world) == [], "before it is erased it is encrypted, everywhere"
    assert MARKER in await read_by_everybody(world), "and readable to those who have the key"

    report = await world.erasure().run(ann)
    assert report.done and report.first and report.sessions == 1
    assert states(report) == {
        "key": "deleted", "sessions.v1": "unreadable", "rewards.v1": "none", "feedback.v1": "unreadable",
        "tasks.v1": "none", "subjects.v1": "none", "dlq.v1": "unreadable", "objects": "deleted", "tables": "none",
    }  # fmt: skip
    assert await world.blobs.of_subject(ann) == [] and await world.blobs.of_subject(ben) != []
    left = await read_by_everybody(world)
    assert left.count(MARKER) > 0, "ben's is still readable"
    await world.erasure().run(ben)
    assert MARKER not in await read_by_everybody(world) and await plain_places(world) == []
    with pytest.raises(SubjectErased):
        await world.said(ann, "another-session")


async def test_erasing_twice_is_erasing_once(world: PrivateWorld) -> None:
    await world.said("ann", "s-1")
    first = await world.erasure().run("ann")
    again = await world.erasure().run("ann")
    assert (first.first, again.first) == (True, False)
    assert (first.requested_at, again.requested_at, again.done) == (first.requested_at, first.requested_at, True)
    assert len(await kinds_on(world, ErasureRequested)) == len(await kinds_on(world, ErasureDone)) == 1
    (done,) = await kinds_on(world, ErasureDone)
    assert done.request_id == again.request_id and done.stores == states(first)


async def test_a_run_that_was_killed_at_any_point_is_finished_by_the_next(world: PrivateWorld) -> None:
    async def die() -> None:
        raise faults.Killed

    assert POINTS
    for point in POINTS:
        subject = point.replace(".", "-")
        await world.said(subject, f"s-{subject}")
        with faults.armed(point, die), pytest.raises(faults.Killed):
            await world.erasure().run(subject)
        report = await world.erasure().run(subject)
        assert report.done and report.sessions == 1, point
        assert report.first == (point == "erasure.requested"), point
        assert [one.subject for one in await kinds_on(world, ErasureDone)].count(subject) == 1, point
        assert [one.subject for one in await kinds_on(world, ErasureRequested)].count(subject) == 1, point


async def test_what_was_written_in_plain_is_reported_readable_and_never_done(world: PrivateWorld) -> None:
    """Older than the key store, or a foreign client's: a log cannot forget, so it must not be claimed to have."""
    await world.said("ann", "s-1")
    async with EventLog(world.log.config) as without_keys:
        meta = Meta(origin="production", subject="ann")
        ref = await without_keys.append(
            "sessions.v1", "s-1", an_event(MessageReceived(message_id="1", text=MARKER), meta=meta)
        )
    foreign = json.dumps({"body": {"session_id": "s-1", "verdict": "rejected", "comment": MARKER}}).encode()
    await world.log.append_raw("feedback.v1", b"x", foreign, [("ce_type", b"feedback.given.v1"), ("ce_id", b"f")])
    report = await world.erasure().run("ann")
    assert not report.done and await kinds_on(world, ErasureDone) == []
    found = {one.store: one for one in report.stores if not one.done}
    assert set(found) == {"sessions.v1", "feedback.v1"} and str(ref) in found["sessions.v1"].detail


async def test_case_cortex_366_a_store_that_does_not_answer_is_unreachable_and_never_done(world: PrivateWorld) -> None:
    await world.said("ann", "s-1")
    away = S3Store(S3Config(bucket="none", endpoint="http://127.0.0.1:9", access_key="x", secret_key="y"))
    report = await Erasure(world.log, BlobStore(away, keys=world.ring)).run("ann")
    away.close()
    assert not report.done and states(report)["objects"] == "unreachable"
    assert await kinds_on(world, ErasureDone) == []
    assert (await world.erasure().run("ann")).done, "run again, it is finished"


async def test_case_cortex_366_exported_rows_of_an_erased_subject_are_taken_out_of_the_files(
    world: PrivateWorld,
) -> None:
    lane = world.lane
    for subject in ("ann", "ben"):
        await lane.grant(subject)
        await lane.group(origin="production", subject=subject)
    files = {"jsonl": world.data / "rows.jsonl", "parquet": world.data / "rows.parquet"}
    for form, path in files.items():
        note(world.data, path, form)
        with JsonlWriter(path) if form == "jsonl" else ParquetWriter(path) as writer:
            assert (await export(world.log, Filter(), str, writer)).rows == 4
    note(world.data, world.data / "moved.jsonl", "jsonl")
    exports = ExportedFiles(world.data)
    report = await world.erasure(exports).run("ann")
    assert states(report)["exports"] == "unreachable" and not report.done, "one of them is not where it was written"
    assert _sessions_in(files) == {f"{lane.lane}.g1.{n}" for n in range(2)}, "ben's are left, in both"
    note(world.data, world.data / "moved.jsonl", "jsonl", gone=True)
    assert (await world.erasure(exports).run("ann")).done


def _sessions_in(files: dict[str, Path]) -> set[str]:
    import pyarrow.parquet as parquet

    lines = files["jsonl"].read_text().splitlines()
    rows: Iterable[str] = parquet.read_table(files["parquet"]).column("session_id").to_pylist()
    found = {json.loads(line)["session_id"] for line in lines}
    assert found == set(rows)
    return found


# -- guarantees 8, 9 and 5 together -----------------------------------------------------------------------------------


async def test_an_erased_member_is_named_and_the_rest_of_every_batch_still_verifies(world: PrivateWorld) -> None:
    """Guarantee 5: rebuilt or erased, leaf by leaf; and nothing of theirs is in a later batch."""
    lane = world.lane
    training = TrainingWorld(lane, world.blobs.store, Path(), uuid.uuid4().hex)  # type: ignore[arg-type]
    await lane.configure(groups_per_batch=3)
    for subject in ("ann", "ben"):
        await lane.grant(subject)
    for subject in ("ann", "ben", ""):
        await lane.group(origin="production" if subject else "rl", subject=subject)
    await training.assemble(1, groups=0)
    assert str(await rebuild_all(world.log, lane.lane)) == "1/1 byte-identical"
    ((_, before),) = await lane.batches()
    late = await lane.group(origin="production", subject="ann")
    report = await world.erasure().run("ann")
    assert [(one.batch_id, one.version) for one in report.batches] == [(before.batch_id, None)]
    assert report.exclusion.pending == [before.batch_id] and report.exclusion.broken == []

    rebuilt = await rebuild_all(world.log, lane.lane)
    (verdict,) = rebuilt.batches
    ours = {m.session_id: m.subject for m in before.members}
    assert verdict.leaves == {s: "erased" if subject == "ann" else "rebuilt" for s, subject in ours.items()}
    assert verdict.reassembled and verdict.intact and not verdict.identical
    assert str(rebuilt) == "0/1 byte-identical; 1/1 but for 2 erased members"

    await training.assemble(1, already=1, groups=3)
    (_, (_, after)) = await lane.batches()
    assert {group.offset: group.reason for group in after.dropped} == {late: "consent"}
    assert "ann" not in {member.subject for member in after.members}
    again = await world.erasure().run("ann")
    assert again.exclusion.batches == 1 and again.exclusion.broken == [] and again.done
    assert [one.identical for one in (await rebuild_all(world.log, lane.lane)).batches] == [False, True]


async def test_whoever_lacks_the_keys_assembles_verifies_and_trains_nothing_of_theirs(
    world: PrivateWorld, warm_start: Path
) -> None:
    """A wrong key store is no erasure: the line stops and says so, and zeros are never taken for tokens."""
    lane = world.lane
    await lane.grant("ann")
    await lane.group(origin="production", subject="ann")
    elsewhere = KeyRing(KeyFiles(world.data / "other-keys"))
    async with EventLog(world.log.config, world.blobs, elsewhere) as without:
        with pytest.raises(KeyUnavailable, match="of subject 'ann' may be trained on and cannot be read"):
            await asyncio.wait_for(Assembler(without, lane.lane).run(), 120)
        assert await lane.batches() == []
        training = TrainingWorld(lane, world.blobs.store, warm_start, uuid.uuid4().hex)  # type: ignore[arg-type]
        await training.assemble(1, groups=0)
        with pytest.raises(KeyUnavailable, match="key store lacks the key of subject 'ann'"):
            await rebuild_all(without, lane.lane)
        blind = TrainerLoop(without, training.checkpoints, lane.configuration(), warm_start, None)
        with pytest.raises(KeyUnavailable):
            await asyncio.wait_for(blind.run(), 120)
    assert await lane.steps() == []
    await training.train(1)


async def test_a_key_that_is_gone_without_a_request_on_the_log_stops_the_assembler(world: PrivateWorld) -> None:
    """The log was restored to a time before the erasure: it has to be told again, not passed over."""
    await world.lane.grant("ann")
    await world.lane.group(origin="production", subject="ann")
    await world.ring.destroy("ann", "in another history")
    with pytest.raises(KeyUnavailable, match="settle it with `odradek subject erase`"):
        await asyncio.wait_for(Assembler(world.log, world.lane.lane).run(), 120)
    assert (await world.erasure().run("ann")).done
    await world.lane.group()
    await TrainingWorld(world.lane, world.blobs.store, Path(), "x").assemble(1, groups=0)  # type: ignore[arg-type]
    ((_, batch),) = await world.lane.batches()
    assert [group.reason for group in batch.dropped] == ["consent"]


async def test_a_leaf_does_not_confirm_a_guess_about_erased_text(world: PrivateWorld) -> None:
    """The same tokens under two keys, or under none, give leaves that nobody can compare."""
    lane = world.lane
    for subject in ("ann", "ben"):
        await lane.grant(subject)
    from odradek.streams.assembly.v1 import merkle
    from odradek.streams.replay.rebuild import lane_config, sequences_of

    await TrainingWorld(lane, world.blobs.store, Path(), "x").assemble(1, origin="production", subject="ann")  # type: ignore[arg-type]
    ((_, batch),) = await lane.batches()
    config = await lane_config(world.log, batch)
    sequences = await sequences_of(world.log, batch)
    from odradek.streams.assembly.v1.select import trained_masks

    for member in batch.members:
        sequence = sequences[member.session_id]
        masks, _ = trained_masks(sequence, batch.ordinal, config.max_staleness)
        assert member.leaf != merkle.leaf(sequence, masks, member.advantage)
        assert member.leaf == merkle.leaf(sequence, masks, member.advantage, (await world.ring.obtain("ann")).leaf)
        assert member.leaf != merkle.leaf(sequence, masks, member.advantage, (await world.ring.obtain("ben")).leaf)


async def test_a_subject_erased_between_assembly_and_step_has_zero_weight_and_the_lane_goes_on(
    world: PrivateWorld, warm_start: Path
) -> None:
    """Guarantees 8 and 9: the step is taken without them, says so, and lineage tells who was trained on."""
    lane = world.lane
    training = TrainingWorld(lane, world.blobs.store, warm_start, uuid.uuid4().hex)  # type: ignore[arg-type]
    await lane.configure(groups_per_batch=2)
    for subject in ("ann", "ben"):
        await lane.grant(subject)
        await lane.group(origin="production", subject=subject)
    await training.assemble(1, groups=0)
    pending = (await world.erasure().run("ann")).exclusion.pending
    await training.train(1)
    (step,) = await lane.steps()
    ((_, batch),) = await lane.batches()
    theirs = [m.session_id for m in batch.members if m.subject == "ann"]
    assert pending == [batch.batch_id] and step.left_out == theirs and len(theirs) == 2
    assert step.metrics["trained_tokens"] == sum(m.trained_tokens for m in batch.members if m.subject == "ben")
    report = await world.erasure().run("ann")
    assert (report.exclusion.steps, report.exclusion.broken, report.versions) == (1, [], [])
    reached = (await world.erasure().run("ben")).versions
    assert [(one.version, one.how) for one in reached] == [(1, "trained")]
    (done,) = [one for one in await kinds_on(world, ErasureDone) if one.subject == "ben"]
    assert done.versions == {lane.policy: [1]} and done.batches == [batch.batch_id]


async def test_a_batch_of_nobody_but_the_erased_is_a_step_that_moves_nothing_of_theirs(
    world: PrivateWorld, warm_start: Path
) -> None:
    training = TrainingWorld(world.lane, world.blobs.store, warm_start, uuid.uuid4().hex)  # type: ignore[arg-type]
    await world.lane.grant("ann")
    await training.assemble(1, origin="production", subject="ann")
    await world.erasure().run("ann")
    await training.train(1)
    (step,) = await world.lane.steps()
    assert len(step.left_out) == 2 and step.metrics["trained_tokens"] == 0


async def test_a_grant_after_the_erasure_is_of_no_effect(world: PrivateWorld) -> None:
    await world.lane.grant("ann")
    await world.erasure().run("ann")
    await world.lane.grant("ann")
    consents = Consents()
    await consents.refresh(world.log)
    assert not consents("ann") and consents.erased == {"ann"}


async def test_the_id_of_a_request_is_the_same_whoever_asks(world: PrivateWorld) -> None:
    first, second = await asyncio.gather(world.erasure().run("ann"), world.erasure().run("ann"))
    assert first.request_id == second.request_id == event_id("erasure", "ann")
    assert (await world.erasure().run("ann")).done
