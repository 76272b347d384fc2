"""What the notary signs, and the folds of audit.anchors.v1. Pure but for `read_anchors` and `read_signed`.

An anchor is a statement about one interval of one partition. `statement` is its only signed form: lines of text, which
anybody can check without this code. Anchors are bound three ways: to the records by chain head and root, to the
partition's anchor before by `previous`, and to every anchor of the deployment by the digest of the round before.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from odradek.streams import topics
from odradek.streams.audit import chain
from odradek.streams.audit.keys import SigningKey, signed_by
from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.audit import AnchorEvent, AnchorWritten, ChainBegun
from odradek.streams.events.meta import RecordRef
from odradek.streams.log import EventLog

NOTHING = "0" * 64
"""Stands for the digest of what is before the first."""

MARK = struct.Struct(">I8s")

Place = tuple[str, int]
"""A partition: topic without prefix, and number."""


def statement(anchor: AnchorEvent) -> bytes:
    """The signed text of an anchor. Its lines and their order are fixed for ever; a change is another first line."""
    lines = _chain_lines(anchor) if isinstance(anchor, ChainBegun) else _anchor_lines(anchor)
    return "".join(f"{name}: {value}\n" for name, value in lines).encode()


def _anchor_lines(anchor: AnchorWritten) -> tuple[tuple[str, object], ...]:
    return (
        ("odradek audit anchor", "v1"),
        ("deployment", anchor.deployment),
        ("round", anchor.round),
        ("before", anchor.before),
        ("topic", anchor.topic),
        ("partition", anchor.partition),
        ("first", anchor.first),
        ("last", anchor.last),
        ("count", anchor.count),
        ("chain", anchor.chain),
        ("root", anchor.root),
        ("marks", hashlib.sha256(anchor.marks).hexdigest()),
        ("previous", anchor.previous),
        ("locked", str(anchor.locked).lower()),
        ("time_ms", anchor.time_ms),
        ("key", anchor.key),
    )


def _chain_lines(begun: ChainBegun) -> tuple[tuple[str, object], ...]:
    return (
        ("odradek audit chain", "v1"),
        ("deployment", begun.deployment),
        ("chain", begun.chain),
        ("before", begun.before),
        ("on_log", begun.on_log),
        ("kept", begun.kept),
        ("why", hashlib.sha256(begun.why.encode()).hexdigest()),
        ("reason", hashlib.sha256(begun.reason.encode()).hexdigest()),
        ("time_ms", begun.time_ms),
        ("key", begun.key),
    )


def digest(anchor: AnchorWritten) -> str:
    """What the partition's next anchor calls `previous`."""
    return hashlib.sha256(statement(anchor)).hexdigest()


def round_digest(anchors: Iterable[AnchorWritten]) -> str:
    """What the next round calls `before`: over the statements of the round, in their order."""
    return hashlib.sha256(b"".join(chain.chunk(statement(one)) for one in anchors)).hexdigest()


def round_bytes(anchors: Sequence[AnchorWritten]) -> bytes:
    """The object of a round on S3: its anchors as JSON, complete with signatures and marks."""
    return msgspec.json.encode(list(anchors), order="deterministic")


def read_round(data: bytes) -> list[AnchorWritten]:
    """The anchors of a round's object; raises msgspec's errors where it is none."""
    return msgspec.json.decode(data, type=list[AnchorWritten])


def genuine(anchor: AnchorEvent, trusted: Iterable[str]) -> bool:
    """Whether one of the trusted keys signed exactly this."""
    return anchor.key in trusted and signed_by(anchor.key, anchor.signature, statement(anchor))


def marks_of(offsets: Sequence[int], leaves: Sequence[bytes]) -> bytes:
    """The marks of an interval's records."""
    before = [offsets[0], *offsets]
    return b"".join(MARK.pack(at - was, leaf[:8]) for at, was, leaf in zip(offsets, before, leaves, strict=False))


def read_marks(anchor: AnchorWritten) -> list[tuple[int, bytes]]:
    """Offset and leaf prefix of each record of the interval."""
    found, at = [], anchor.first
    for delta, prefix in MARK.iter_unpack(anchor.marks):
        at += delta
        found.append((at, prefix))
    return found


@dataclass(slots=True)
class Cursor:
    """How far a partition is anchored."""

    head: bytes
    next: int
    """Offset after the last anchored record."""
    previous: str = NOTHING

    @classmethod
    def start(cls, place: Place) -> Cursor:
        """Nothing is anchored yet."""
        return cls(chain.genesis(*place), 0)

    @classmethod
    def after(cls, anchor: AnchorWritten) -> Cursor:
        """Where an anchor leaves off."""
        return cls(bytes.fromhex(anchor.chain), anchor.last + 1, digest(anchor))


@dataclass(frozen=True, slots=True)
class Round:
    """What the anchors made together have in common."""

    deployment: str
    number: int
    before: str
    locked: bool
    time_ms: int
    key: SigningKey

    def anchor(self, place: Place, cursor: Cursor, offsets: Sequence[int], leaves: Sequence[bytes]) -> AnchorWritten:
        """The signed anchor of one interval; moves the cursor behind it."""
        unsigned = AnchorWritten(
            deployment=self.deployment,
            round=self.number,
            before=self.before,
            topic=place[0],
            partition=place[1],
            first=offsets[0],
            last=offsets[-1],
            count=len(offsets),
            chain=chain.linked(cursor.head, leaves).hex(),
            root=chain.root(leaves).hex(),
            marks=marks_of(offsets, leaves),
            previous=cursor.previous,
            locked=self.locked,
            time_ms=self.time_ms,
            key=self.key.public,
            signature=b"",
        )
        anchor = msgspec.structs.replace(unsigned, signature=self.key.sign(statement(unsigned)))
        cursor.head, cursor.next, cursor.previous = bytes.fromhex(anchor.chain), anchor.last + 1, digest(anchor)
        return anchor


@dataclass(slots=True)
class AnchorLog:
    """audit.anchors.v1 as it lies there: rounds of genuine anchors in order, and what is none."""

    rounds: dict[int, list[AnchorWritten]] = field(default_factory=dict)
    refs: dict[tuple[str, int, int], RecordRef] = field(default_factory=dict)
    """By topic, partition and first offset where the anchor lies."""
    foreign: list[tuple[RecordRef, str]] = field(default_factory=list)
    """Records that no trusted key signed, or that are no anchors, with the reason."""


@dataclass(slots=True)
class Signed:
    """Where a notary goes on. Its size does not grow with what was signed, but for a few bytes a round."""

    rounds: set[int] = field(default_factory=set)
    cursors: dict[Place, Cursor] = field(default_factory=dict)
    before: str = NOTHING
    held: dict[int, list[AnchorWritten]] = field(default_factory=dict)
    """The rounds that the vault lacks, and the newest that it has."""
    foreign: list[tuple[RecordRef, str]] = field(default_factory=list)


async def read_signed(event_log: EventLog, chain: str, trusted: Iterable[str], kept: Sequence[int]) -> Signed:
    """Folds the topic in the order in which one notary after another wrote it, `kept` being the vault's rounds,
    ascending. An anchor that does not come after its partition's last one is passed over."""
    found, trusted, topic = Signed(), frozenset(trusted), topics.AUDIT_ANCHORS.name
    there, open_round = frozenset(kept[:-1]), list[AnchorWritten]()

    def close() -> None:
        if open_round:
            number, found.before = open_round[0].round, round_digest(open_round)
            found.rounds.add(number)
            if number not in there:
                found.held[number] = open_round

    async for record in event_log.read(topic, 0, await event_log.beginning(topic, 0)):
        body = _anchor(record, chain, trusted, found.foreign)
        if body is None:
            continue
        place = (body.topic, body.partition)
        if place in found.cursors and body.first < found.cursors[place].next:
            found.foreign.append((record.ref, "repeats an anchor, or stands behind its successor"))
            continue
        if open_round and open_round[0].round != body.round:
            close()
            open_round = []
        open_round.append(body)
        found.cursors[place] = Cursor.after(body)
    close()
    return found


def _anchor(
    record: Record, chain: str, trusted: frozenset[str], foreign: list[tuple[RecordRef, str]]
) -> AnchorWritten | None:
    """The chain's anchor in a record, if a trusted key signed it; what is none, and not another chain's, is foreign."""
    try:
        body = record.event.body
    except UndecodableRecord as error:
        foreign.append((record.ref, f"is no anchor: {error}"))
        return None
    if isinstance(body, ChainBegun):
        if not genuine(body, trusted):
            foreign.append((record.ref, f"begins a chain and is signed by no known key ({body.key[:16]}…)"))
        return None
    if body.deployment != chain:
        return None
    if not genuine(body, trusted):
        foreign.append((record.ref, f"is signed by no known key (it names {body.key[:16]}…)"))
        return None
    anchor: AnchorWritten = body
    return anchor


async def read_anchors(event_log: EventLog, chain: str, trusted: Iterable[str]) -> AnchorLog:
    """Folds the topic. Anchors of other chains (given up by a restore) are passed over."""
    trusted, found, topic = frozenset(trusted), AnchorLog(), topics.AUDIT_ANCHORS.name
    async for record in event_log.read(topic, 0, await event_log.beginning(topic, 0)):
        body = _anchor(record, chain, trusted, found.foreign)
        if body is None:
            continue
        place = (body.topic, body.partition, body.first)
        if place in found.refs:
            found.foreign.append((record.ref, f"repeats the anchor at {found.refs[place]}"))
        else:
            found.refs[place] = record.ref
            found.rounds.setdefault(body.round, []).append(body)
    return found
