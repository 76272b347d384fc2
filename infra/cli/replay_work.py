"""What `odradek replay rebuild` does between reading its options and printing: batches of a lane, made again.

Not a command of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from odradek.infra.errors import UsageError
from odradek.streams import topics
from odradek.streams.assembly.v1.batch import MicroArrays
from odradek.streams.assembly.versions import assembler
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import LaneSeals, RebuildReport, batches_of, lane_config, sequences_of, verify_batch
from odradek.streams.replay.select import bodies

Say = Callable[[str], None]


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, made again."""

    batch_id: str
    ordinal: int
    members: int
    tokens: int
    trained_tokens: int
    sha256: str
    """Of the packed arrays that the trainer gets, members without consent at the step masked: equal on any host."""
    missing: list[str]
    """Sessions whose records no longer make a sequence; then there are no arrays."""

    def text(self) -> str:
        """One line for a person."""
        head = f"batch {self.ordinal} ({self.batch_id}): {self.members} members, "
        if self.missing:
            return f"{head}{len(self.missing)} cannot be rebuilt: {', '.join(self.missing)}"
        return f"{head}{self.tokens} tokens, {self.trained_tokens} trained, sha256 {self.sha256}"


async def verified_batches(event_log: EventLog, lane: str, batch_id: str | None, say: Say) -> RebuildReport:
    """Every batch of the lane, or the one asked for, against what was recorded."""
    report, seals = RebuildReport(), LaneSeals(event_log, lane)
    async for batch, after in _wanted(event_log, lane, batch_id):
        report.batches.append(await verify_batch(event_log, batch, after, seals))
        say(f"{len(report.batches)} batches compared so far, {report.identical} of them byte-identical")
    return report


async def rebuilt_batches(event_log: EventLog, lane: str, batch_id: str | None, say: Say) -> list[Rebuilt]:
    """The arrays of every batch of the lane, or of the one asked for, as their digest."""
    left_out: dict[str, list[str]] = {}
    async for body in bodies(event_log, topics.BATCHES.name):
        if isinstance(body, StepCompleted):
            left_out[body.batch_id] = body.left_out
    found: list[Rebuilt] = []
    async for batch, _ in _wanted(event_log, lane, batch_id):
        found.append(await _rebuilt(event_log, batch, frozenset(left_out.get(batch.batch_id, ()))))
        say(f"{len(found)} batches")
    return found


async def _rebuilt(event_log: EventLog, batch: BatchAssembled, left_out: frozenset[str]) -> Rebuilt:
    sequences = await sequences_of(event_log, batch)
    missing = [member.session_id for member in batch.members if member.session_id not in sequences]
    micros: list[MicroArrays] = []
    if not missing:
        config = await lane_config(event_log, batch)
        make = assembler(batch.assembler_version).materialise
        micros = make(batch, sequences, config.max_staleness, left_out)
    return Rebuilt(
        batch_id=batch.batch_id,
        ordinal=batch.ordinal,
        members=len(batch.members),
        tokens=sum(len(micro.tokens) for micro in micros),
        trained_tokens=sum(sum(micro.mask) for micro in micros),
        sha256=arrays_digest(micros) if not missing else "",
        missing=missing,
    )


def arrays_digest(micros: Iterable[MicroArrays]) -> str:
    """sha256 over the arrays in the order of their fields, each with its length before it, as they lie in memory."""
    sha = hashlib.sha256()
    for micro in micros:
        for name in MicroArrays.__slots__:
            data = getattr(micro, name)
            raw = data.tobytes()
            sha.update(len(raw).to_bytes(8, "little"))
            sha.update(raw)
    return sha.hexdigest()


async def _wanted(event_log: EventLog, lane: str, batch_id: str | None) -> AsyncIterator[tuple[BatchAssembled, int]]:
    """(batch, input offset of the batch before it) in order. Raises UsageError if the one asked for is not there."""
    after, found = -1, False
    async for _, batch in batches_of(event_log, lane):
        if batch_id is None or batch.batch_id == batch_id:
            found = True
            yield batch, after
        after = batch.input_offset
    if batch_id is not None and not found:
        raise UsageError(f"no batch {batch_id!r} on lane {lane}; `replay verify --json` lists what there is")
