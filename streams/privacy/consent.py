"""Consent as a fold of subjects.v1: a grant stands until it is withdrawn or erasure is requested.

No grant, no training: an unknown subject, and the empty one, has none. Erasure is for ever: a later grant is of no
effect, for nothing of theirs can be read or written any more. `Consents` knows the offset it has read up to, so that a
batch or a step can record what it relied on.

Guarantee 8 (tests/GUARANTEES.md): test_privacy_log.py, test_assembly_v1.py, test_assembler_loop.py,
test_trainer_loop.py, test_privacy_erasure.py.
"""

from __future__ import annotations

import logging

from odradek.streams import topics
from odradek.streams.errors import DecodeError
from odradek.streams.events.subjects import (
    ConsentGranted,
    ConsentWithdrawn,
    ErasureDone,
    ErasureRequested,
    SubjectEvent,
)
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

TRAIN = "train"
"""The scope of a grant that allows training."""


class Consents:
    """The standing grants up to `offset` (exclusive)."""

    def __init__(self) -> None:
        self.offset = 0
        self._granted: set[str] = set()
        self.erased: set[str] = set()
        """Subjects whose erasure was requested."""

    def __call__(self, subject: str) -> bool:
        """Whether a grant to train stands for this subject."""
        return bool(subject) and subject in self._granted

    def apply(self, offset: int, event: SubjectEvent) -> None:
        """Fold one record."""
        self.offset = offset + 1
        match event:
            case ConsentGranted(scope=scope) if scope == TRAIN and event.subject not in self.erased:
                self._granted.add(event.subject)
            case ConsentWithdrawn(scope=scope) if scope == TRAIN:
                self._granted.discard(event.subject)
            case ErasureRequested() | ErasureDone():
                self.erased.add(event.subject)
                self._granted.discard(event.subject)
            case _:
                pass

    async def refresh(self, event_log: EventLog, end: int | None = None) -> None:
        """Read on to the topic's end (or to `end`). A record that can't be decoded takes nothing away and gives
        nothing: it is logged and passed over. An unknown type raises: it may be a new way to withdraw, so a reader
        that does not know it must not go on."""
        stop = await event_log.stable_end(topics.SUBJECTS.name, 0) if end is None else end
        async for record in event_log.read(topics.SUBJECTS.name, 0, self.offset, stop):
            try:
                self.apply(record.ref.offset, record.event.body)
            except DecodeError as error:
                log.warning("consent: record set aside: %s", error)
        self.offset = max(self.offset, stop)
