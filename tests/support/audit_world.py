"""Stored records and their anchors, without a broker: what the audit's pure parts are given in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st

from odradek.streams.audit import chain
from odradek.streams.audit.anchors import NOTHING, Cursor, Place, Round, round_digest
from odradek.streams.audit.check import Finding, PartitionCheck
from odradek.streams.audit.keys import SigningKey
from odradek.streams.envelope import Record
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.meta import RecordRef

PLACE = ("sessions.v1", 3)
KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))

_bytes = st.none() | st.binary(max_size=12)
_headers = st.lists(st.tuples(st.text(max_size=6), _bytes), max_size=4).map(tuple)
_record = st.builds(
    lambda key, value, headers, timestamp: Record(RecordRef(*PLACE, 0), key, value, headers, timestamp),
    _bytes,
    _bytes,
    _headers,
    st.integers(-1, 2**62),
)


def _at_offsets(records: list[Record], gaps: list[int]) -> list[Record]:
    """Markers and aborted records leave gaps between offsets."""
    placed, offset = [], -1
    for record, gap in zip(records, gaps, strict=True):
        offset += 1 + gap
        placed.append(replace(record, ref=RecordRef(*PLACE, offset)))
    return placed


def partitions(least: int = 2, most: int = 12) -> st.SearchStrategy[list[Record]]:
    """The visible records of one partition."""
    return st.integers(least, most).flatmap(
        lambda n: st.builds(
            _at_offsets,
            st.lists(_record, min_size=n, max_size=n),
            st.lists(st.integers(0, 2), min_size=n, max_size=n),
        )
    )


def anchored(records: Sequence[Record], interval: int, rounds: int = 2, place: Place = PLACE) -> list[AnchorWritten]:
    """Anchors of `interval` records each, dealt out to that many to a round."""
    cursor, before, anchors = Cursor.start(place), NOTHING, []
    pieces = [records[start : start + interval] for start in range(0, len(records), interval)]
    for number, start in enumerate(range(0, len(pieces), rounds)):
        this = Round("default", number, before, True, 1_700_000_000_000 + number, KEY)
        made = [
            this.anchor(place, cursor, [one.ref.offset for one in piece], [chain.leaf_of(one) for one in piece])
            for piece in pieces[start : start + rounds]
        ]
        before = round_digest(made)
        anchors += made
    return anchors


def checked(anchors: Sequence[AnchorWritten], records: Sequence[Record], end: int | None = None) -> Finding | None:
    """What a partition's check says of the records that are there now."""
    check = PartitionCheck(PLACE, anchors)
    for record in records:
        if (finding := check.feed(record)) is not None:
            return finding
    return check.finish(end if end is not None else (records[-1].ref.offset + 1 if records else 0))
