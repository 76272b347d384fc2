"""Rebuild batches from the log and compare their hashes: the training path itself, run again.

Reads batches.v1, the lane's configuration, and exactly the records each batch names. Needs no actor and no trainer.
A batch is byte-identical when every leaf matches what was recorded at training time and assembling its groups again
gives the recorded event byte for byte. Members whose subject was erased are named; everything else still has to match.

Guarantee 5 (tests/GUARANTEES.md): test_assembly_golden.py, test_assembly_v1.py, test_assembler_loop.py,
test_trainer_loop.py, test_kill_each_actor.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import msgspec

from odradek.streams import topics
from odradek.streams.assembly.reader import Extent, read_groups, read_sequences
from odradek.streams.assembly.v1.sequence import Sequence
from odradek.streams.assembly.versions import assembler
from odradek.streams.errors import DecodeError, Terminal
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupSealed, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog
from odradek.streams.privacy.consent import Consents
from odradek.streams.privacy.leaves import leaf_keys_of
from odradek.streams.sealing import GroupRule

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """One batch, leaf by leaf."""

    batch_id: str
    ordinal: int
    leaves: dict[str, str]
    """Session id to rebuilt, erased, missing or mismatch."""
    reassembled: bool
    """Whether assembling its groups again gave the very same event: members, advantages, layout, hashes. An erased
    member's leaf, which nobody can make again, is taken as recorded."""

    @property
    def identical(self) -> bool:
        """Every leaf rebuilt and the event made again byte for byte."""
        return self.reassembled and all(verdict == "rebuilt" for verdict in self.leaves.values())

    @property
    def intact(self) -> bool:
        """Identical, but for members whose subject was erased."""
        return self.reassembled and all(verdict in ("rebuilt", "erased") for verdict in self.leaves.values())


@dataclass(slots=True)
class RebuildReport:
    """All batches of a lane."""

    batches: list[BatchVerdict] = field(default_factory=list)

    @property
    def identical(self) -> int:
        return sum(batch.identical for batch in self.batches)

    @property
    def erased(self) -> int:
        """Members that cannot be rebuilt because their subject was erased."""
        return sum(verdict == "erased" for batch in self.batches for verdict in batch.leaves.values())

    def __str__(self) -> str:
        said = f"{self.identical}/{len(self.batches)} byte-identical"
        intact = sum(batch.intact for batch in self.batches)
        return f"{said}; {intact}/{len(self.batches)} but for {self.erased} erased members" if self.erased else said


async def batches_of(event_log: EventLog, lane: str) -> AsyncIterator[tuple[RecordRef, BatchAssembled]]:
    """Every committed batch of a lane, in order."""
    number = topics.BATCHES.partition_of(lane)
    start = await event_log.beginning(topics.BATCHES.name, number)
    async for record in event_log.read(topics.BATCHES.name, number, start):
        try:
            body = record.event.body
        except DecodeError:
            continue
        if isinstance(body, BatchAssembled) and body.lane == lane:
            yield record.ref, body


async def lane_config(event_log: EventLog, batch: BatchAssembled) -> LaneConfigured:
    """The configuration a batch was assembled under. Raises Terminal if its record holds something else."""
    number = topics.GROUPS.partition_of(batch.lane)
    ref = RecordRef(topics.GROUPS.name, number, batch.config_offset)
    body = (await event_log.read_ref(ref)).event.body
    if not isinstance(body, LaneConfigured):
        raise Terminal(f"batch {batch.batch_id} names {ref} as its configuration, which holds {type(body).__name__}")
    return body


async def sequences_of(event_log: EventLog, batch: BatchAssembled) -> dict[str, Sequence]:
    """The canonical sequences of a batch's members, from exactly the records it names."""
    extents = [Extent(m.session_id, m.partition, m.first_offset, m.last_offset) for m in batch.members]
    return await read_sequences(event_log, extents)


class LaneSeals:
    """A lane's seals that count (`sealing.GroupRule`), read forwards; asked for an earlier offset it begins again."""

    def __init__(self, event_log: EventLog, lane: str) -> None:
        self._log = event_log
        self._lane = lane
        self._partition = topics.GROUPS.partition_of(lane)
        self._position: int | None = None
        self._rule = GroupRule()

    async def between(self, after: int, through: int) -> list[tuple[int, GroupSealed]]:
        """Those at groups.v1 offsets (after, through]: what a batch was made of."""
        if self._position is None or self._position > after + 1:
            self._position, self._rule = await self._log.beginning(topics.GROUPS.name, self._partition), GroupRule()
        seals = []
        async for record in self._log.read(topics.GROUPS.name, self._partition, self._position, through + 1):
            self._position = record.ref.offset + 1
            try:
                body = record.event.body
            except DecodeError:
                continue
            if body.lane != self._lane or not self._rule.accepts(body) or record.ref.offset <= after:
                continue
            if isinstance(body, GroupSealed):
                seals.append((record.ref.offset, body))
        return seals


async def verify_batch(
    event_log: EventLog, batch: BatchAssembled, after: int, seals: LaneSeals | None = None
) -> BatchVerdict:
    """Rebuild one batch with the assembler version it records; `after` is the batch before's input offset (-1 for the
    first). Selection, advantages, masks, packing and hashes are made again from the seals, under the consents and
    the configuration that the batch recorded; each leaf is made again from the records that the batch names. Give the
    same `seals` for one batch after another, so that the lane is read once."""
    config = await lane_config(event_log, batch)
    consents = Consents()
    await consents.refresh(event_log, batch.subjects_offset)
    seals = seals or LaneSeals(event_log, batch.lane)
    groups = await read_groups(event_log, await seals.between(after, batch.input_offset))
    code = assembler(batch.assembler_version)
    read = {session: one for group in groups for session, one in group.sequences.items()}
    leaf_key = await leaf_keys_of(event_log, batch, read)
    again: BatchAssembled = code.reassemble(batch, groups, config, consents, leaf_key)
    same = msgspec.msgpack.encode(again) == msgspec.msgpack.encode(batch)
    # The same members at the same offsets: the sequences just read are those that the batch names.
    sequences = read if same else await sequences_of(event_log, batch)
    leaves = code.verify(batch, sequences, config.max_staleness, leaf_key)
    return BatchVerdict(batch.batch_id, batch.ordinal, leaves, same)


async def rebuild_all(event_log: EventLog, lane: str, progress: Say = lambda _text: None) -> RebuildReport:
    """Rebuild and verify every batch of a lane."""
    report, seals = RebuildReport(), LaneSeals(event_log, lane)
    after = -1
    async for _, batch in batches_of(event_log, lane):
        report.batches.append(await verify_batch(event_log, batch, after, seals))
        after = batch.input_offset
        if len(report.batches) % 20 == 0:
            progress(f"  {len(report.batches)} batches compared so far, {report.identical} of them byte-identical")
    return report
