"""What `odradek replay` does between reading its options and printing: batches of a lane made again, sessions compared.

Not a command of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.session.check import check
from odradek.actors.session.errors import ReplayDivergence
from odradek.infra.errors import UsageError
from odradek.streams import topics
from odradek.streams.assembly.v1.batch import MicroArrays
from odradek.streams.assembly.versions import assembler
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.sessions import SessionOpened
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord
from odradek.streams.replay.rebuild import LaneSeals, RebuildReport, batches_of, lane_config, sequences_of, verify_batch
from odradek.streams.replay.select import bodies, readable

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


@dataclass(slots=True)
class Checked:
    """Sessions against their state machine."""

    compared: int = 0
    other_tokenizer: int = 0
    diverged: list[ReplayDivergence] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.compared - len(self.diverged)}/{self.compared} sessions as their state machine produces them"
        return text + (f"; {self.other_tokenizer} of another tokenizer left out" if self.other_tokenizer else "")

    def value(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("session_id", "topic", "partition", "offset", "expected", "found")
        diverged = [{name: getattr(one, name) for name in names} for one in self.diverged]
        return {"compared": self.compared, "other_tokenizer": self.other_tokenizer, "diverged": diverged}


async def checked_sessions(event_log: EventLog, wanted: frozenset[str], tokenizer: Path, say: Say) -> Checked:
    """Every session on the log, or those asked for; one partition's in memory at a time."""
    template, report = XmlTemplate(Tokenizer.from_file(tokenizer)), Checked()
    found: dict[str, list[SessionRecord]] = {}
    partition = -1
    missing = set(wanted)

    def compare() -> None:
        for session, records in found.items():
            _compare(report, session, records, template, partition)
        found.clear()
        say(f"{report.compared} sessions compared so far, {len(report.diverged)} of them diverge")

    async for record in readable(event_log, topics.SESSIONS.name):
        if record.ref.partition != partition:
            compare()
            partition = record.ref.partition
        key, event = record.key or "", record.event
        if not wanted or key in wanted:
            missing.discard(key)
            found.setdefault(key, []).append((record.ref.offset, event.id, event.meta, event.body))
    compare()
    if missing:
        raise UsageError(f"no session {', '.join(sorted(missing))} on the log")
    return report


def _compare(
    report: Checked, session: str, records: list[SessionRecord], template: XmlTemplate, partition: int
) -> None:
    opened = records[0][3]
    if isinstance(opened, SessionOpened) and opened.tokenizer not in ("", template.tokenizer.digest):
        report.other_tokenizer += 1
        return
    report.compared += 1
    try:
        check(session, records, template, topic=topics.SESSIONS.name, partition=partition)
    except ReplayDivergence as divergence:
        report.diverged.append(divergence)
