"""The arithmetic of the audit: a record's leaf, a partition's chain, an interval's Merkle root. Pure.

Everything is SHA-256 over what is stored, never over a re-encoding: key, value, and headers in their order are taken as
the bytes that lie on the log. Each use of the hash begins with a byte of its own (0 leaf, 1 node, 2 link, 3 genesis):
no value of one kind can stand for one of another. All integers are big-endian.

    chunk(x)  = int64 length, then the bytes; length -1 alone for no value (an empty value has length 0)
    leaf      = H(0x00, chunk("odradek.record.v1"), chunk(topic), int32 partition, int64 offset, int64 timestamp,
                  chunk(key), chunk(value), int32 headers, then chunk(name), chunk(value) of each header)
    node      = H(0x01, left, right)                    the tree of RFC 6962 over leaves
    head      = H(0x02, head before, leaf)              the chain of a partition, over all its visible records
    genesis   = H(0x03, chunk("odradek.chain.v1"), chunk(topic), int32 partition)     the head before the first record

Topics are named without the deployment's prefix. A node's odd last child moves up unchanged, which is the tree that RFC
6962 defines by splitting at the largest power of two.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from odradek.streams.envelope import Record

RECORD_DOMAIN = b"odradek.record.v1"
CHAIN_DOMAIN = b"odradek.chain.v1"

_int64 = struct.Struct(">q").pack
_place = struct.Struct(">iqq").pack
_int32 = struct.Struct(">i").pack


def chunk(data: bytes | None) -> bytes:
    """Bytes with their length before them; no value is not an empty value."""
    return _int64(-1) if data is None else _int64(len(data)) + data


def leaf_of(record: Record) -> bytes:
    """The leaf hash of a stored record."""
    ref = record.ref
    parts = [
        b"\x00",
        chunk(RECORD_DOMAIN),
        chunk(ref.topic.encode()),
        _place(ref.partition, ref.offset, record.timestamp_ms),
        chunk(record.key_bytes),
        chunk(record.value),
        _int32(len(record.headers)),
    ]
    for name, content in stored_headers(record):
        parts += (chunk(name), chunk(content))
    return hashlib.sha256(b"".join(parts)).digest()


def stored_headers(record: Record) -> list[tuple[bytes, bytes | None]]:
    """A record's headers as bytes, in their order."""
    if record.raw_names is None:
        return [(name.encode(), content) for name, content in record.headers]
    return [(raw, content) for raw, (_, content) in zip(record.raw_names, record.headers, strict=True)]


def genesis(topic: str, partition: int) -> bytes:
    """The chain's head before a partition's first record."""
    return hashlib.sha256(b"\x03" + chunk(CHAIN_DOMAIN) + chunk(topic.encode()) + _int32(partition)).digest()


def linked(head: bytes, leaves: Iterable[bytes]) -> bytes:
    """The chain's head after more records."""
    for leaf in leaves:
        head = hashlib.sha256(b"\x02" + head + leaf).digest()
    return head


def node(left: bytes, right: bytes) -> bytes:
    """An inner node of the tree."""
    return hashlib.sha256(b"\x01" + left + right).digest()


def _above(level: Sequence[bytes]) -> list[bytes]:
    """The next level of the tree."""
    pairs = [node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
    return [*pairs, level[-1]] if len(level) % 2 else pairs


def root(leaves: Sequence[bytes]) -> bytes:
    """The Merkle tree hash of leaf hashes; of none, the hash of nothing."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    level = list(leaves)
    while len(level) > 1:
        level = _above(level)
    return level[0]


def path(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The siblings, from the leaf up, that lead from a leaf to the root."""
    found, level = [], list(leaves)
    while len(level) > 1:
        if (index ^ 1) < len(level):
            found.append(level[index ^ 1])
        level, index = _above(level), index // 2
    return found
