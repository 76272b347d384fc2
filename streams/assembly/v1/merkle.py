"""Hashes of a batch: one leaf a member, one root a batch.

A leaf covers fixed arrays in little-endian bytes, each length-prefixed, never a re-encoding of an event: tokens int32,
mask uint8 (after the staleness mask), log-probs float32, versions int32 of every segment, then the advantage float32.
For a subject with a key it is HMAC-SHA-256 under that key (a plain hash would confirm guesses about erased text),
else SHA-256. The root follows RFC 6962 section 2.1: leaf hash 0x00, node hash 0x01, split at the largest power of two.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence as Many
from typing import Any

from odradek.streams.assembly.v1.sequence import Sequence


def leaf(sequence: Sequence, masks: list[array[int]], advantage: float, key: bytes | None = None) -> str:
    """Hex digest of one member. `masks`: a uint8 array a segment, the tokens that are trained."""
    digest: Any = hmac.new(key, digestmod=hashlib.sha256) if key is not None else hashlib.sha256()
    _add(digest, sequence.session_id.encode())
    for segment, mask in zip(sequence.segments, masks, strict=True):
        for values in (segment.tokens, mask, segment.logprobs, segment.versions):
            _add(digest, little_endian(values))
    _add(digest, struct.pack("<f", advantage))
    return str(digest.hexdigest())


def little_endian(values: array[Any]) -> bytes:
    """The array's bytes in little-endian order on any host."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def root(leaves: Many[str]) -> str:
    """Hex Merkle tree hash of hex leaves (RFC 6962); of no leaves, the hash of nothing."""
    if not leaves:
        return hashlib.sha256(b"").hexdigest()
    return _tree([bytes.fromhex(one) for one in leaves]).hex()


def _tree(leaves: Many[bytes]) -> bytes:
    if len(leaves) == 1:
        return hashlib.sha256(b"\x00" + leaves[0]).digest()
    split = 1 << ((len(leaves) - 1).bit_length() - 1)
    return hashlib.sha256(b"\x01" + _tree(leaves[:split]) + _tree(leaves[split:])).digest()


def _add(digest: Any, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
