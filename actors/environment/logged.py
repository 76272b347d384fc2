"""The workspace delta as it is logged, and back: `WorkspaceDelta` of the events against `Delta` of the sandboxes.

Content above `INLINE_BYTES` becomes a claim check, put before the event that names it. Round trip is exact in paths,
kinds, modes, targets and bytes (tested). What a delta can't carry is named in the event.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.actors.environment.errors import SandboxInfraError
from odradek.streams.blobs import BlobStore
from odradek.streams.events.sessions import FileChange, WorkspaceDelta

SKIPPED_NAMED = 50
"""Things not carried that one event names. More would let a command that makes a thousand FIFOs write novels."""

INLINE_BYTES = 64 * 1024
"""Bytes of one file's content that still travel inside the event. Too low: an object a line; too high: events near the
broker's record limit when a call changes several files."""


async def to_logged(delta: Delta, blobs: BlobStore, subject: str) -> WorkspaceDelta:
    """The delta as an event carries it; large contents are durable in the object store on return."""
    changes = [await _change(entry, blobs, subject) for entry in delta.entries]
    more = len(delta.skipped) - SKIPPED_NAMED
    skipped = [*delta.skipped[:SKIPPED_NAMED], *([f"and {more} more"] if more > 0 else [])]
    return WorkspaceDelta(changes=changes, skipped=skipped)


async def _change(entry: DeltaEntry, blobs: BlobStore, subject: str) -> FileChange:
    if entry.kind == "file" and entry.content is None:
        raise SandboxInfraError(f"{entry.path!r}: the driver gave a digest without the content; nothing can log that")
    content = entry.content or b""
    if entry.kind == "symlink":
        content = entry.target.encode()
    if len(content) <= INLINE_BYTES:
        return FileChange(path=entry.path, kind=entry.kind, mode=entry.mode, content=content)
    ref = await blobs.put(content, subject=subject)
    return FileChange(path=entry.path, kind=entry.kind, mode=entry.mode, ref=ref)


async def from_logged(deltas: Iterable[WorkspaceDelta], blobs: BlobStore) -> list[Delta]:
    """The deltas of a session, contents fetched and verified."""
    return [
        Delta(tuple([await _entry(change, blobs) for change in delta.changes]), tuple(delta.skipped))
        for delta in deltas
    ]


async def _entry(change: FileChange, blobs: BlobStore) -> DeltaEntry:
    content = await blobs.get(change.ref) if change.ref is not None else change.content
    match change.kind:
        case "file":
            digest = hashlib.sha256(content).hexdigest()
            return DeltaEntry(
                path=change.path, kind="file", mode=change.mode, size=len(content), digest=digest, content=content
            )
        case "symlink":
            return DeltaEntry(path=change.path, kind="symlink", target=content.decode())
        case _:
            return DeltaEntry(path=change.path, kind=change.kind, mode=change.mode)
