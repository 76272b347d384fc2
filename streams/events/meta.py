"""What every event carries beside its body: who caused it, for whom, and in which order its owner wrote it."""

from __future__ import annotations

from typing import Literal

import msgspec

Origin = Literal["production", "rl", "eval"]
"""Which traffic an event belongs to. ``eval`` is never trained on; ``production`` only with consent."""

NO_SEQUENCE = -1
"""`Meta.seq` and `Meta.epoch` of an event that no session owner wrote (inputs, decisions)."""


class Cipher(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a body lacks, encrypted under its subject's key (`streams/privacy`)."""

    box: bytes = b""
    """Format, key id, nonce and AES-256-GCM ciphertext; empty where it is an object, which a header then names."""
    lengths: dict[str, int] = {}
    """The body's fields that are in the box, and how many bytes each byte field had (0 for others)."""


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Envelope data that travels inside the value, so that it is hashed and replayed with the body."""

    origin: Origin = "rl"
    tenant: str = "default"
    subject: str = ""
    """Whose data the body holds; empty means nobody's (RL on our own tasks)."""
    seq: int = NO_SEQUENCE
    """Position among the owner's events of this epoch, from 0."""
    epoch: int = NO_SEQUENCE
    """Owner epoch: the offset of the owner's own session.opened or session.resumed record."""
    causation: str = ""
    """Id of the event that led to this one."""
    correlation: str = ""
    """Group, trace or request that this event belongs to."""
    idempotency_key: str = ""
    time_ms: int = 0
    """Event time by the writer's clock, milliseconds since 1970. Never used to order anything."""
    cipher: Cipher | None = None
    """As stored: the content that the body lacks. As read: present only where the reader cannot see the content (the
    subject was erased, or it has no key), and then the body's content fields are empty of it."""


class RecordRef(msgspec.Struct, frozen=True, order=True):
    """The coordinates of one record on the log."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


class BlobRef(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A claim check: where the bytes lie and what they must hash to."""

    key: str
    sha256: str
    size: int
    """Of the object as stored."""
    subject: str = ""
    """Under whose key the object is encrypted; empty: under nobody's."""
