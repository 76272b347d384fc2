"""dlq.v1: what became of dead letters. A letter itself is the original record with extra headers (`streams/dlq.py`)."""

from __future__ import annotations

import msgspec


class DeadLetterReleased(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deadletter.released.v1"):
    """A person let a key go: its letters are delivered again, in order, to the consumer that refused them."""

    consumer: str
    topic: str
    key: bytes
    reason: str = ""
    by: str = ""
    """Who decided it."""


class DeadLetterDropped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deadletter.dropped.v1"):
    """A person gave a letter up: it is never delivered."""

    consumer: str
    letter: int
    """Offset of the letter on dlq.v1."""
    reason: str = ""
    by: str = ""
    """Who decided it."""


class DeadLetterDelivered(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deadletter.delivered.v1"):
    """The consumer handled a released letter."""

    consumer: str
    letter: int


class DeadLetterRefused(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="deadletter.refused.v1"):
    """The consumer failed on a released letter again; the key is held back as before."""

    consumer: str
    letter: int
    error: str


DeadLetterEvent = DeadLetterReleased | DeadLetterDropped | DeadLetterDelivered | DeadLetterRefused
