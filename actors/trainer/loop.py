"""The training loop of one lane: a batch in, a version out, exactly once.

Consumes batches.v1 of its lane, in order. Produces step.completed and version.published, in one transaction with the
input's position. Guarantees:
- version 0 is the warm start, published like any other, and a branch's first version its parent's weights and
  optimiser under the parent's number; step n turns version n - 1 into n;
- no batch is trained twice, none is skipped: the next holder resumes after the last committed step's batch, and an
  existing manifest is adopted only if it is that very batch's;
- the log says which incarnation it is in (`odradek restore` begins one): no other one's manifests are looked at;
- of two trainers one wins a version; the other discards its result and loads the winner's;
- old versions are pruned after a commit, by the rules of `pruning`;
- members whose consent is gone by the time of the step get zero weight and are listed;
- what is trained is what the batch recorded: a member whose rebuilt sequence has another hash stops the lane.
Waits: for batches (nothing is owed), for store and broker (their deadlines). A fenced trainer stops.

Guarantee 4 (tests/GUARANTEES.md): test_assembler_loop.py, test_trainer_loop.py, test_fault_points.py,
test_transactions.py, test_kill_each_actor.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from odradek.actors.policy.model import Policy
from odradek.actors.trainer.batch import TrainingBatch
from odradek.actors.trainer.checkpoint import Checkpoints, Published, TrainerState, Weights
from odradek.actors.trainer.errors import BatchError, CheckpointError
from odradek.actors.trainer.manifest import ConsentRead, Origin, Place, check_adoptable
from odradek.actors.trainer.pruning import Keep, Pruner
from odradek.actors.trainer.step import StepReport, StepSettings, train_step
from odradek.kernels.numerics import numerics_id
from odradek.streams import topics
from odradek.streams.assembly.v1.batch import MicroArrays
from odradek.streams.assembly.v1.sequence import Sequence
from odradek.streams.assembly.versions import assembler
from odradek.streams.envelope import Event, Record, event_id
from odradek.streams.errors import DecodeError
from odradek.streams.events.batches import BatchAssembled, IncarnationBegun, StepCompleted
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.weights import VersionPublished
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.privacy.leaves import LeafKey, leaf_keys_of
from odradek.streams.replay.rebuild import lane_config, sequences_of
from odradek.streams.transactions import Stage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Done:
    """One step's result, before it is committed."""

    report: StepReport
    published: Published


def training_batch(
    micros: list[MicroArrays], owners: list[int] | None = None, experts: list[bytes] | None = None
) -> TrainingBatch:
    """The trainer's arrays of a materialised batch: micro-batches one after another, in layout order. `owners`: the
    member that each sequence belongs to; None: each to one of its own. `experts`: what each was routed to."""
    starts = [0]
    for micro in micros:
        before = starts[-1]
        starts += [before + end for end in micro.starts[1:]]

    def joined(field: str, dtype: Any) -> Any:
        return np.concatenate([np.asarray(getattr(micro, field), dtype) for micro in micros])

    return TrainingBatch(
        tokens=joined("tokens", np.int32),
        positions=joined("positions", np.int32),
        seq_starts=np.asarray(starts, np.int32),
        loss_mask=joined("mask", np.bool_),
        sampler_logprobs=joined("logprobs", np.float32),
        advantages=joined("advantages", np.float32),
        versions=joined("versions", np.int32),
        sessions=None if owners is None else np.asarray(owners, np.int32),
        experts=None if experts is None or not any(experts) else tuple(experts),
    )


class TrainerLoop:
    """Runs one lane. `run` returns only by exception or cancellation."""

    def __init__(
        self,
        event_log: EventLog,
        checkpoints: Checkpoints,
        lane: LaneConfigured,
        warm_start: Path,
        keep: Keep | None = None,
    ) -> None:
        self._log = event_log
        self._checkpoints = checkpoints
        self._lane = lane
        self._warm_start = warm_start
        self._partition = topics.BATCHES.partition_of(lane.lane)
        self._consents = Consents()
        self._pruner = Pruner(event_log, lane.policy, lane.lane, keep or Keep())
        self._state: TrainerState | None = None
        self._weights: Weights | None = None
        self._thread = ThreadPoolExecutor(1, "training", initializer=lambda: torch.set_num_threads(1))
        self.version = -1
        """Newest version that the log names; -1 before start-up is over."""
        self.position = 0
        """Next offset of batches.v1 to read."""
        self.busy_s = 0.0

    async def run(self) -> None:
        """Resume, then follow the lane for ever."""
        outputs = [(topics.BATCHES.name, self._partition), (topics.WEIGHTS.name, 0)]
        async with Stage(self._log, f"trainer.{self._lane.lane}", outputs) as stage:
            try:
                await self._resume(stage)
                assert self._state is not None
                self.version = self._state.version
                async for record in self._log.tail(topics.BATCHES.name, {self._partition: self.position}):
                    await self._on_record(stage, record)
                    self.position = record.ref.offset + 1
            finally:
                self._thread.shutdown(wait=False)

    # -- start-up ----------------------------------------------------------------------------------------------

    async def _resume(self, stage: Stage) -> None:
        last = await stage.last(topics.BATCHES.name, self._partition, self._is_mark)
        if last is None:
            self.position = await self._log.beginning(topics.BATCHES.name, self._partition)
            await self._begin(stage)
            return
        mark: StepCompleted | IncarnationBegun = last.event.body
        self.position = mark.batch_offset + 1
        await self._restore(mark.manifest_key, mark.manifest_sha256)
        log.info("lane %s goes on after %s, batches.v1 offset %d", self._lane.lane, mark.manifest_key, self.position)

    def _is_mark(self, record: Record) -> bool:
        """Whether it says how far the lane is trained."""
        try:
            body = record.event.body
        except DecodeError:
            return False
        return isinstance(body, StepCompleted | IncarnationBegun) and body.lane == self._lane.lane

    async def _restore(self, manifest_key: str, sha256: str) -> None:
        """Take up a version that the log names, and go on in its incarnation."""
        place, version = Place.of_key(manifest_key)
        self._checkpoints = self._checkpoints.at(place)
        try:
            manifest = await self._checkpoints.manifest(version, sha256)
            self._state, self._weights = await self._checkpoints.restore(manifest)
        except CheckpointError as error:
            raise CheckpointError(
                f"lane {self._lane.lane}: the log goes on from version {version} ({manifest_key}), which the object "
                f"store does not have whole: {error}. If the two are of different moments, `odradek restore` begins a "
                f"new incarnation at the newest version complete in both"
            ) from error

    async def _begin(self, stage: Stage) -> None:
        """Publish the lane's first version, once. What the log has as that is taken as it is."""
        already = await stage.last(topics.WEIGHTS.name, 0, self._is_first)
        if already is not None:
            await self._restore(already.event.body.manifest_key, already.event.body.manifest_sha256)
            return
        state, copied_from = await self._first()
        origin = Origin(parent=None, configuration=self._lane.training, copied_from=copied_from)
        published = await self._publish(state, origin, None, ConsentRead())
        async with stage.transaction() as transaction:
            await transaction.append(topics.WEIGHTS.name, self._lane.policy, self._version_event(published, ""))

    async def _first(self) -> tuple[TrainerState, str]:
        """The state before the first step, and the manifest that it is a copy of (empty: the warm start)."""
        parent = self._lane.parent
        if parent is None:
            policy = await self._compute(lambda: Policy.load_hf(self._warm_start))
            return TrainerState.begin(policy, seed=0), ""
        place, version = Place.of_key(parent.manifest_key)
        theirs = self._checkpoints.at(place)
        state, _ = await theirs.restore(await theirs.manifest(version, parent.manifest_sha256))
        return state, parent.manifest_key

    def _is_first(self, record: Record) -> bool:
        try:
            body = record.event.body
        except DecodeError:
            return False
        first = self._lane.parent.version if self._lane.parent is not None else 0
        return isinstance(body, VersionPublished) and (body.policy, body.lane, body.version) == (
            self._lane.policy,
            self._lane.lane,
            first,
        )

    # -- one batch ---------------------------------------------------------------------------------------------

    async def _on_record(self, stage: Stage, record: Record) -> None:
        try:
            body = record.event.body
        except DecodeError as error:
            log.warning("batches.v1: record set aside: %s", error)
            return
        if not isinstance(body, BatchAssembled) or body.lane != self._lane.lane:
            return
        if body.ordinal != self.version:
            raise BatchError(
                f"batch {body.batch_id} at {record.ref} has ordinal {body.ordinal}, expected {self.version}: the "
                f"lane's history and its checkpoints do not belong together; `odradek restore` begins a new incarnation"
            )
        done = await self._train(record.ref.offset, body)
        await self._commit(stage, record.ref.offset, body, done)
        await self._pruner.round(stage, self._checkpoints, self.version)

    async def _train(self, offset: int, batch: BatchAssembled) -> _Done:
        assert self._state is not None
        state = self._state
        sequences = await sequences_of(self._log, batch)
        leaf_key = await leaf_keys_of(self._log, batch, sequences)
        await self._consents.refresh(self._log)  # after the keys: whoever was erased is found to be without consent
        left_out = [m.session_id for m in batch.members if m.subject and not self._consents(m.subject)]
        consent = ConsentRead(self._consents.offset, left_out)
        config = await lane_config(self._log, batch)
        given = self._materialise(batch, sequences, leaf_key, config.max_staleness, frozenset(left_out))
        settings = msgspec.convert(config.training, StepSettings)
        began = asyncio.get_running_loop().time()
        report = await self._compute(
            lambda: train_step(state.policy, state.optimiser, given, settings, state.rng, step=state.version + 1)
        )
        self.busy_s += asyncio.get_running_loop().time() - began
        origin = Origin(
            parent=state.version,
            batch_id=batch.batch_id,
            input_offset=offset,
            configuration=config.training,
            batch_root=batch.merkle_root,
        )
        state.version += 1
        await reach("trainer.before_publish")
        published = await self._publish(state, origin, self._weights, consent)
        await reach("trainer.after_publish")
        return _Done(report, published)

    @staticmethod
    def _materialise(
        batch: BatchAssembled,
        sequences: Mapping[str, Sequence],
        leaf_key: LeafKey,
        max_staleness: int,
        left_out: frozenset[str],
    ) -> TrainingBatch:
        """The batch's arrays from exactly the records it names; raises BatchError where their hash is another one.
        What nobody can read any more has no hash; it has no weight either, and keeps its place."""
        code = assembler(batch.assembler_version)
        leaves: dict[str, str] = code.verify(batch, sequences, max_staleness, leaf_key)
        unseen = {session for session, verdict in leaves.items() if verdict == "erased"} & left_out
        wrong = [f"{s} is {verdict}" for s, verdict in leaves.items() if verdict != "rebuilt" and s not in unseen]
        if wrong:
            raise BatchError(
                f"batch {batch.batch_id} (ordinal {batch.ordinal}): the log does not give what the batch recorded: "
                f"{', '.join(wrong[:5])} ({len(wrong)} of {len(leaves)} members); `odradek replay rebuild --verify` "
                f"shows every batch"
            )
        arrays: list[MicroArrays] = code.materialise(batch, sequences, max_staleness, left_out)
        return training_batch(arrays, code.owners(batch, sequences), code.experts(batch, sequences))

    async def _publish(
        self, state: TrainerState, origin: Origin, parent: Weights | None, consent: ConsentRead
    ) -> Published:
        """Store the version; where another trainer's manifest stood first, take that one, if it is of this batch."""
        published = await self._checkpoints.publish(state, origin, numerics_id(), parent, consent)
        if published.won:
            self._state, self._weights = state, published.weights
        else:
            check_adoptable(published.manifest, state.version, origin)
            self._state, self._weights = await self._checkpoints.restore(published.manifest)
        return published

    async def _commit(self, stage: Stage, offset: int, batch: BatchAssembled, done: _Done) -> None:
        consent = done.published.manifest.consent
        step = StepCompleted(
            lane=self._lane.lane,
            policy=self._lane.policy,
            step=done.published.manifest.version,
            batch_id=batch.batch_id,
            batch_offset=offset,
            manifest_key=done.published.key,
            manifest_sha256=done.published.sha256,
            metrics=done.report.metrics(),
            left_out=consent.left_out,
            subjects_offset=consent.subjects_offset,
        )
        identifier = event_id("step", done.published.key)
        event = Event.of(step, id=identifier, source=f"trainer.{self._lane.lane}")
        async with stage.transaction() as transaction:
            await transaction.append(topics.BATCHES.name, self._lane.lane, event)
            await transaction.append(
                topics.WEIGHTS.name, self._lane.policy, self._version_event(done.published, batch.batch_id)
            )
            await transaction.cross_check(
                f"trainer.{self._lane.lane}", {(topics.BATCHES.name, self._partition): offset + 1}
            )
            await reach("trainer.before_commit")
        self.version = step.step
        await reach("trainer.after_commit")
        log.info("step %d: %s", self.version, done.report)

    def _version_event(self, published: Published, batch_id: str) -> Event[VersionPublished]:
        manifest = published.manifest
        body = VersionPublished(
            policy=self._lane.policy,
            version=manifest.version,
            manifest_key=published.key,
            manifest_sha256=published.sha256,
            lane=self._lane.lane,
            step=manifest.version,
            batch_id=batch_id,
            parent=manifest.origin.parent,
            numerics_id=manifest.numerics_id,
            parent_key=manifest.origin.copied_from,
        )
        identifier = event_id("version", published.key)
        return Event.of(body, id=identifier, source=f"trainer.{self._lane.lane}")

    async def _compute(self, work: Callable[[], Any]) -> Any:
        """On the one thread that computes, so that the broker's heartbeats go on beside it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
