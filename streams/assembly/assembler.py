"""The assembler: one lane's sealed groups in, batches out, exactly once.

Consumes one partition of groups.v1 (its only driving input) and exactly the records named there. Produces
batch.assembled on batches.v1. Guarantees:
- a batch and the input offset it consumed commit in one transaction: after a kill, the next holder resumes from the
  last committed batch's `input_offset`; no group is batched twice and none is skipped;
- a group is batched at most once, whatever lies on groups.v1: only the seals that `sealing.GroupRule` takes count,
  and its state is folded again from the lane's partition at every start;
- a batch closes after `groups_per_batch` kept groups and never splits one;
- a fenced predecessor cannot write;
- a record of a type that this build does not know ends it with that error: what a newer release wrote is not skipped.
Waits: for groups (no deadline: nothing is owed), for the log (its deadlines). Unblocked by the controller's seals.

Guarantee 4 (tests/GUARANTEES.md): test_assembler_loop.py, test_trainer_loop.py, test_fault_points.py,
test_transactions.py, test_kill_each_actor.py.
"""

from __future__ import annotations

import logging

from odradek.streams import topics
from odradek.streams.assembly.reader import read_group
from odradek.streams.assembly.v1.batch import Positions, build
from odradek.streams.assembly.v1.select import Choice, GroupRecords, Kept, choose
from odradek.streams.envelope import Event, Record
from odradek.streams.errors import DecodeError, KeyUnavailable, NoPosition
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupSealed, LaneConfigured
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.privacy.leaves import LeafKey, leaf_keys
from odradek.streams.sealing import GroupRule
from odradek.streams.transactions import Stage

log = logging.getLogger(__name__)


def _check_readable(kept: list[Kept], leaf_key: LeafKey) -> None:
    """No batch is made of what its maker could not read. Keys were read before consent, so an erased subject's groups
    have been dropped; what is left is a fault of the set-up, which a person must see."""
    for sequence in (one.sequence for group in kept for one in group.candidates):
        subject, readable = sequence.meta.subject, not sequence.withheld
        try:
            leaf_key(subject)
        except KeyError:
            readable = False
        if not readable:
            raise KeyUnavailable(
                f"session {sequence.session_id} of subject {subject!r} may be trained on and cannot be read: its key "
                f"is not in this key store, or was destroyed though no erasure is on subjects.v1. Give the assembler "
                f"the deployment's own (privacy.keys), or settle it with `odradek subject erase`",
                subject=subject,
            )


class Assembler:
    """Runs one lane. `run` returns only by exception or cancellation."""

    def __init__(self, event_log: EventLog, lane: str) -> None:
        self._log = event_log
        self._lane = lane
        self._consents = Consents()
        self._partition = topics.GROUPS.partition_of(lane)
        self._output = (topics.BATCHES.name, topics.BATCHES.partition_of(lane))
        self._config: tuple[int, LaneConfigured] | None = None
        self._rule = GroupRule()
        self._pending: list[GroupRecords] = []
        self._ordinal: int | None = None
        """Of the next batch; None before the lane's first, which its configuration numbers."""
        self.position = 0
        """Next offset of groups.v1 to read."""

    @property
    def ignored(self) -> int:
        """Records of groups.v1 that count for nothing: repeated, out of place or of other members than opened."""
        return self._rule.ignored

    async def run(self) -> None:
        """Resume, then follow the lane for ever."""
        stage = Stage(self._log, f"assembler.{self._lane}", [self._output])
        async with stage:
            await self._resume(stage)
            async for record in self._log.tail(topics.GROUPS.name, {self._partition: self.position}):
                await self._on_record(stage, record)
                self.position = record.ref.offset + 1

    async def _resume(self, stage: Stage) -> None:
        last = await stage.last(*self._output, self._is_batch)
        if last is not None:
            batch: BatchAssembled = last.event.body
            self._ordinal, self.position = batch.ordinal + 1, batch.input_offset + 1
        else:
            self.position = await self._log.beginning(topics.GROUPS.name, self._partition)
        await self._fold_the_past()

    def _is_batch(self, record: Record) -> bool:
        try:
            body = record.event.body
        except DecodeError:
            return False
        return isinstance(body, BatchAssembled) and body.lane == self._lane

    async def _fold_the_past(self) -> None:
        """The lane.configured in force where reading resumes, and the groups that have had their end before it."""
        start = await self._log.beginning(topics.GROUPS.name, self._partition)
        async for record in self._log.read(topics.GROUPS.name, self._partition, start, self.position):
            self._seal(record)

    def _seal(self, record: Record) -> GroupSealed | None:
        """Folds one record; the seal in it, if it is one of this lane's that counts."""
        try:
            body = record.event.body
        except DecodeError as error:
            log.warning("groups.v1: record set aside: %s", error)
            return None
        if body.lane != self._lane:
            return None
        if isinstance(body, LaneConfigured):
            self._config = (record.ref.offset, body)
        if not self._rule.accepts(body):
            log.warning("%s at %s counts for nothing: group %s", type(body).__name__, record.ref, body.group_id)
            return None
        return body if isinstance(body, GroupSealed) else None

    async def _on_record(self, stage: Stage, record: Record) -> None:
        sealed = self._seal(record)
        if sealed is None:
            return
        if self._config is None:
            raise NoPosition(f"lane {self._lane}: group sealed at {record.ref} before any lane.configured")
        self._pending.append(await read_group(self._log, record.ref.offset, sealed))
        await reach("assembler.group_read")
        leaf_key = await leaf_keys(self._log, (s.meta.subject for g in self._pending for s in g.sequences.values()))
        await self._consents.refresh(self._log)
        chosen = choose(self._pending, self._config[1], self._consents)
        if len(chosen.kept) >= self._config[1].groups_per_batch:
            _check_readable(chosen.kept, leaf_key)
            await self._commit(stage, record.ref.offset, chosen, leaf_key)

    async def _commit(self, stage: Stage, input_offset: int, chosen: Choice, leaf_key: LeafKey) -> None:
        assert self._config is not None
        config_offset, config = self._config
        positions = Positions(
            config_offset=config_offset,
            input_offset=input_offset,
            subjects_offset=self._consents.offset,
            weights_offset=await self._log.stable_end(topics.WEIGHTS.name, 0),
        )
        first = config.parent.version if config.parent is not None else 0
        ordinal = first if self._ordinal is None else self._ordinal
        batch = build(chosen.kept, chosen.dropped, config, ordinal, positions, leaf_key)
        event = Event.of(batch, id=batch.batch_id, source=f"assembler.{self._lane}")
        async with stage.transaction() as transaction:
            await transaction.append(topics.BATCHES.name, self._lane, event)
            await transaction.cross_check(
                f"assembler.{self._lane}", {(topics.GROUPS.name, self._partition): input_offset + 1}
            )
            await reach("assembler.before_commit")
        await reach("assembler.after_commit")
        log.info(
            "lane %s batch %d: %d groups kept, %d dropped, %d members",
            self._lane,
            ordinal,
            len(chosen.kept),
            len(chosen.dropped),
            len(batch.members),
        )
        self._ordinal = ordinal + 1
        self._pending = []
