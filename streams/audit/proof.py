"""Inclusion proofs: that a record was anchored, checkable without this code (`check_proof.py` needs hashlib alone).

A proof holds the record as it is stored, its place in the interval, the siblings up to the root, and the signed
statement that names the root. It proves that the notary saw exactly this record at exactly this offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from odradek.streams.audit import chain
from odradek.streams.audit.anchors import AnchorLog, statement
from odradek.streams.audit.scope import audited_topics
from odradek.streams.audit.verify import Say
from odradek.streams.envelope import Record
from odradek.streams.errors import Terminal
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.log import EventLog

FORMAT = "odradek audit proof v1"


class NotProvable(Terminal):
    """The record is not anchored yet, or not as it was anchored."""


class ProvedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it is stored; bytes are base64 in JSON."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]]


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a check needs."""

    format: str
    record: ProvedRecord
    index: int
    """Place of the record among the interval's `count` records, from 0."""
    count: int
    path: list[str]
    """Hex siblings from the leaf up."""
    statement: str
    """The signed text; its `root` line is what the path must lead to."""
    signature: str
    """Hex Ed25519 signature of the statement by the key of its `key` line."""


async def find(event_log: EventLog, ce_id: str, topic: str | None, say: Say) -> Record | None:
    """The first record of an event id, in the given topic or in all audited ones."""
    wanted, seen = ce_id.encode(), 0
    for name in [topic] if topic is not None else await audited_topics(event_log):
        for partition in await event_log.partitions(name):
            start = await event_log.beginning(name, partition)
            async with aclosing(event_log.read(name, partition, start)) as records:
                async for record in records:
                    if any(header.lower() == "ce_id" and raw == wanted for header, raw in record.headers):
                        return record
                    seen += 1
                    if seen % 5000 == 0:
                        say(f"{name}/{partition}, {seen} records")
    return None


def anchor_of(anchors: AnchorLog, record: Record) -> AnchorWritten | None:
    """The anchor whose interval holds the record."""
    ref = record.ref
    every = (anchor for one in anchors.rounds.values() for anchor in one)
    here = (anchor for anchor in every if (anchor.topic, anchor.partition) == (ref.topic, ref.partition))
    return next((anchor for anchor in here if anchor.first <= ref.offset <= anchor.last), None)


async def prove(event_log: EventLog, anchors: AnchorLog, record: Record) -> Proof:
    """The proof of a record. Raises NotProvable with the reason."""
    anchor = anchor_of(anchors, record)
    if anchor is None:
        raise NotProvable(f"{record.ref} is not anchored yet: the notary takes it into its next round; try again then")
    interval = event_log.read(record.ref.topic, record.ref.partition, anchor.first, anchor.last + 1)
    async with aclosing(interval) as records:
        return proof_of(anchor, [one async for one in records], record)


def proof_of(anchor: AnchorWritten, interval: Sequence[Record], record: Record) -> Proof:
    """The proof of one of an interval's records. Raises NotProvable if they are not those that were anchored."""
    ref = record.ref
    leaves = [chain.leaf_of(one) for one in interval]
    if chain.root(leaves).hex() != anchor.root:
        raise NotProvable(
            f"{ref}: records {anchor.first}..{anchor.last} are not those that round {anchor.round} anchored; "
            f"`odradek audit verify` names the first that differs"
        )
    index = [one.ref.offset for one in interval].index(ref.offset)
    return Proof(
        format=FORMAT,
        record=ProvedRecord(
            topic=ref.topic,
            partition=ref.partition,
            offset=ref.offset,
            timestamp=record.timestamp_ms,
            key=record.key_bytes,
            value=record.value,
            headers=chain.stored_headers(record),
        ),
        index=index,
        count=len(leaves),
        path=[one.hex() for one in chain.path(leaves, index)],
        statement=statement(anchor).decode(),
        signature=anchor.signature.hex(),
    )
