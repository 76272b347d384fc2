"""audit.anchors.v1: the notary's signed statements of what a partition held."""

from __future__ import annotations

import msgspec


class AnchorWritten(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="audit.anchored.v1"):
    """One interval of one partition: its visible records, in order. What is signed is `audit.anchors.statement`."""

    deployment: str
    round: int
    """From 0, without a gap. All anchors of a round are committed together and lie in one object on S3."""
    before: str
    """Hex digest of the round before (`audit.anchors.round_digest`); zeros before the first."""
    topic: str
    """Without the deployment's prefix."""
    partition: int
    first: int
    last: int
    """Offsets of the interval's first and last visible record."""
    count: int
    """Visible records; less than last - first + 1 where markers and aborted records lie between."""
    chain: str
    """Hex head of the partition's chain after `last`."""
    root: str
    """Hex Merkle root of the interval's leaves."""
    marks: bytes
    """Of each record its offset's distance from the one before (uint32) and the first 8 bytes of its leaf: where to
    look when the root does not fit."""
    previous: str
    """Hex digest of the statement of the partition's anchor before; zeros before the first."""
    locked: bool
    """Whether the bucket holds the round's object under object lock."""
    time_ms: int
    key: str
    """Hex Ed25519 public key that checks `signature`."""
    signature: bytes


class ChainBegun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="audit.chain_begun.v1"):
    """`odradek restore`: the log lacks what was signed, so from here on another chain covers it, from its first record
    on. What is signed is `audit.anchors.statement`."""

    deployment: str
    """The name that stays, whichever chain is in force."""
    chain: str
    """What anchors call the deployment from here on; never used before."""
    before: str
    """The chain that is given up."""
    on_log: int
    kept: int
    """Rounds of that chain that the log still had, and that the vault has."""
    why: str
    """What no notary could go on with."""
    reason: str = ""
    """The person's."""
    time_ms: int
    key: str
    signature: bytes


AnchorEvent = AnchorWritten | ChainBegun
