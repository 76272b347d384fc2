"""Stored records hashed once more, from the format's description alone: what the notary signed must fit these.

The product's notary and verifier share their arithmetic (`streams/audit/chain.py`), so a mistake in it fools both; this
shares nothing with them but the format: SHA-256, big-endian lengths, RFC 6962's tree. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from odradek.streams.envelope import Record


def leaf(record: Record) -> bytes:
    """The leaf hash of a record, over every byte that is stored of it."""
    ref, whole = record.ref, hashlib.sha256(b"\0")
    for text in (b"odradek.record.v1", ref.topic.encode()):
        whole.update(_sized(text))
    whole.update(ref.partition.to_bytes(4, "big") + ref.offset.to_bytes(8, "big"))
    whole.update(record.timestamp_ms.to_bytes(8, "big", signed=True))
    whole.update(_sized(record.key_bytes) + _sized(record.value) + len(record.headers).to_bytes(4, "big"))
    names = record.raw_names or [name.encode() for name, _ in record.headers]
    for name, (_, content) in zip(names, record.headers, strict=True):
        whole.update(_sized(name) + _sized(content))
    return whole.digest()


def _sized(data: bytes | None) -> bytes:
    return (-1).to_bytes(8, "big", signed=True) if data is None else len(data).to_bytes(8, "big") + data


def root(leaves: Sequence[bytes]) -> bytes:
    """RFC 6962's tree hash of one leaf or more."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + root(leaves[:half]) + root(leaves[half:])).digest()
