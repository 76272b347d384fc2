"""The HMAC keys of batch leaves, as read at one moment.

Read the sessions first, then their keys, then consent: erasing writes `erasure.requested` before it destroys a key, so
whoever finds a key gone also finds, after that, that consent is; and content that could still be read has its leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from odradek.streams.errors import KeyUnavailable, SubjectErased
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.log import EventLog

if TYPE_CHECKING:
    from odradek.streams.assembly.v1.sequence import Sequence

LeafKey = Callable[[str], bytes | None]
"""The HMAC key of a subject's leaves; None for a subject without one. Raises KeyError for an erased subject."""


async def leaf_keys(event_log: EventLog, subjects: Iterable[str]) -> LeafKey:
    """For assembling: the keys of these subjects, made where one has none yet. Without a key store no leaf is keyed."""
    ring = event_log.keys
    if ring is None:
        return lambda _subject: None
    found: dict[str, bytes] = {}
    for subject in sorted({one for one in subjects if one}):
        try:
            found[subject] = (await ring.obtain(subject)).leaf
        except SubjectErased:
            continue
    return lambda subject: found[subject] if subject else None


async def leaf_keys_of(event_log: EventLog, batch: BatchAssembled, sequences: Mapping[str, Sequence]) -> LeafKey:
    """For verifying: the keys of the batch's subjects. Raises KeyUnavailable where this reader could not see a member's
    content though its subject was not erased: nothing could be said of that leaf."""
    ring, found, erased = event_log.keys, dict[str, bytes | None](), set[str]()
    for subject in sorted({member.subject for member in batch.members if member.subject}):
        key = await ring.find(subject) if ring is not None else None
        if ring is not None and key is None and ring.erased(subject):
            erased.add(subject)
        found[subject] = key.leaf if key is not None else None
    for member in batch.members:
        sequence = sequences.get(member.session_id)
        if sequence is not None and sequence.withheld and member.subject not in erased:
            raise KeyUnavailable(
                f"session {member.session_id} of batch {batch.batch_id} cannot be read: this reader's key store lacks "
                f"the key of subject {member.subject!r}; give it the deployment's own (privacy.keys)",
                subject=member.subject,
            )

    def leaf_key(subject: str) -> bytes | None:
        if subject in erased:
            raise KeyError(subject)
        return found.get(subject)

    return leaf_key
