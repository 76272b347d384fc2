"""Whether a partition still holds what was anchored: records in, the first thing that is wrong out. Pure.

A partition's anchors say which records it held, in order: their offsets, their leaves, and the chain over them. Fed the
records that it holds now, `PartitionCheck` names the first offset that is not as anchored:
- changed: another record lies at the offset (a byte of key, value, header or time; or two records swapped);
- dropped: no visible record lies there any more, though later ones do;
- inserted: a visible record lies there, and none did;
- truncated: the partition ends there.
Offsets that never had a visible record (transaction markers, aborted records) have no mark and are missed by nobody;
one of them that becomes visible is `inserted`. Records after the last anchor are counted, never judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from odradek.streams.audit import chain
from odradek.streams.audit.anchors import Cursor, Place, digest, read_marks
from odradek.streams.envelope import Record
from odradek.streams.events.audit import AnchorWritten

Kind = Literal["changed", "dropped", "inserted", "truncated", "unreadable", "anchor", "round"]
"""unreadable: the broker or the batch's checksum refuses it; anchor: a record of audit.anchors.v1 is not genuine or not
where it belongs; round: a round is missing or another one."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that is not as it was anchored, at the first offset where it shows."""

    topic: str
    partition: int
    offset: int
    kind: Kind
    detail: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}: {self.kind}: {self.detail}"


class PartitionCheck:
    """One partition's records against its anchors, in order. Feed it every visible record, then `finish`."""

    def __init__(self, place: Place, anchors: Sequence[AnchorWritten]) -> None:
        self._place = place
        self._anchors = list(anchors)
        self._cursor = Cursor.start(place)
        self._marks: list[tuple[int, bytes]] = []
        self._leaves: list[bytes] = []
        self.verified = 0
        """Records of intervals that are whole and as anchored."""
        self.not_anchored = 0
        """Records behind the last anchor."""

    @property
    def next(self) -> int:
        """The offset of the next anchored record; where nothing is left, the one after the last."""
        if not self._anchors:
            return self._cursor.next
        return self._marks[len(self._leaves)][0] if self._marks else self._anchors[0].first

    def feed(self, record: Record) -> Finding | None:
        """The next record; what is wrong with it."""
        if not self._anchors:
            self.not_anchored += 1
            return None
        if not self._marks:
            self._marks = read_marks(self._anchors[0])
            if (fault := self._misplaced(self._anchors[0])) is not None:
                return self._finding(self._cursor.next, "anchor", fault)
        offset, (expected, mark) = record.ref.offset, self._marks[len(self._leaves)]
        leaf = chain.leaf_of(record)
        if offset < expected:
            return self._finding(offset, "inserted", f"no record was here; the next one was at {expected}")
        if offset > expected:
            return self._finding(expected, "dropped", f"a record was here; the next one is at {offset}")
        if leaf[: len(mark)] != mark:
            return self._finding(offset, "changed", "the record that was anchored is another one")
        self._leaves.append(leaf)
        return self._close() if len(self._leaves) == len(self._marks) else None

    def finish(self, end: int) -> Finding | None:
        """There are no more records before `end`, the partition's stable end."""
        if not self._anchors:
            return None
        if end <= self.next:
            return self._finding(
                self.next, "truncated", f"the partition ends at {end}, it was anchored up to {self._anchors[-1].last}"
            )
        return self._finding(self.next, "dropped", f"a record was here; none is left before the end at {end}")

    def _misplaced(self, anchor: AnchorWritten) -> str | None:
        """What is wrong with an anchor as the next one of this partition."""
        shape = (len(self._marks), self._marks[0][0], self._marks[-1][0]) if self._marks else (0, -1, -1)
        if shape != (anchor.count, anchor.first, anchor.last):
            return f"the anchor of round {anchor.round} contradicts its own marks"
        if anchor.previous != self._cursor.previous or anchor.first < self._cursor.next:
            return f"the anchor of round {anchor.round} does not follow the one before it"
        return None

    def _close(self) -> Finding | None:
        """The interval is complete: its root and the chain's head must be the signed ones."""
        anchor = self._anchors[0]
        head = chain.linked(self._cursor.head, self._leaves)
        if (chain.root(self._leaves).hex(), head.hex()) != (anchor.root, anchor.chain):
            where = f"one of the records {anchor.first}..{anchor.last} is another one"
            return self._finding(anchor.first, "changed", f"{where}: root and chain of round {anchor.round} differ")
        self.verified += anchor.count
        self._cursor = Cursor(head, anchor.last + 1, digest(anchor))
        self._anchors.pop(0)
        self._marks, self._leaves = [], []
        return None

    def _finding(self, offset: int, kind: Kind, detail: str) -> Finding:
        return Finding(topic=self._place[0], partition=self._place[1], offset=offset, kind=kind, detail=detail)
