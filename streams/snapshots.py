"""Snapshots of folds on a host's disk: a cache, never a truth.

A snapshot is what a fold had become after the records before its marks. `Snapshots.load` gives one back only if it is
whole (checksum), nobody else can have written it, and it was made under the very key that is asked for: the code that
folds (`code_hash`), the cluster, the deployment and the settings. `unlike` says whether the log is still the one that
was folded: it begins where it began and is no shorter, and the last record folded of each partition lies there byte by
byte, with its time. What fails any of this is dropped with one warning, and the caller folds from the log, which is
always right: a damaged file, a snapshot of an older release or one of another log costs time and nothing else.

Written whole under another name, synced and renamed, so that a process killed at any moment leaves the one before.

tests/unit/test_snapshots.py; tests/properties/test_controller_snapshot_properties.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from odradek.streams.audit.chain import leaf_of
from odradek.streams.envelope import Record
from odradek.streams.errors import OffsetGap
from odradek.streams.events.meta import RecordRef
from odradek.streams.faults import reach
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

MAGIC = b"odradek snapshot 1\n"
DIGEST = 64
"""Hexadecimal digits of the checksum that follows."""
PRIVATE = 0o600
KEPT = 2
"""Newest snapshots of a fold that are kept: one for use, one should that be damaged."""

_ROOT = Path(__file__).parents[1]
"""Where the package's rooms are."""
_IMPORT = re.compile(r"^\s*(?:from (odradek[\w.]*) import (\([^)]*\)|[^\n]*)|import (odradek[\w.]*))", re.MULTILINE)


class Mark(msgspec.Struct, frozen=True):
    """How far one partition is folded."""

    topic: str
    partition: int
    first: int
    """Where the log began."""
    next: int
    """The first offset that is not folded."""
    last: int = -1
    """Offset of the last record folded; -1 if there was none."""
    leaf: bytes = b""
    """Of that record (`audit/chain.py`): its place, time, key, value and headers."""

    def after(self, record: Record | None, end: int) -> Mark:
        """Folded on up to `end`; `record` is the last one on the way."""
        if record is None:
            return msgspec.structs.replace(self, next=max(end, self.next))
        return Mark(self.topic, self.partition, self.first, end, record.ref.offset, leaf_of(record))


class Snapshot(msgspec.Struct, frozen=True):
    """A fold's state after the records before its marks."""

    key: str
    marks: list[Mark]
    state: bytes


class _Unusable(Exception):
    """Why a snapshot can't be taken."""


class Snapshots:
    """The snapshots of one fold, in a folder of their own."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key

    async def save(self, marks: Iterable[Mark], state: bytes) -> None:
        """Adds one, off the loop. A disk that takes nothing is told and no more."""
        try:
            written = await asyncio.to_thread(self._write, Snapshot(self._key, list(marks), state))
            await reach("snapshot.written")
            await asyncio.to_thread(self._place, *written)
        except OSError as error:
            log.warning("snapshot in %s was not written: %s", self._folder, error)
            return
        await reach("snapshot.placed")

    def _write(self, snapshot: Snapshot) -> tuple[Path, Path]:
        """Whole and synced, under a name that nobody reads."""
        body = msgspec.msgpack.encode(snapshot)
        self._folder.mkdir(parents=True, exist_ok=True)
        number = max(map(int, (path.stem for path in self._files())), default=0) + 1
        final = self._folder / f"{number:010d}.snapshot"
        temporary = final.with_suffix(f".{os.getpid()}.tmp")
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, PRIVATE), "wb") as out:
            out.write(MAGIC + hashlib.sha256(body).hexdigest().encode() + body)
            out.flush()
            os.fsync(out.fileno())
        return temporary, final

    def _place(self, temporary: Path, final: Path) -> None:
        """In one step, for good; and away with older ones and with what a killed writer left."""
        temporary.replace(final)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for path in [*self._files()[KEPT:], *self._folder.glob("*.tmp")]:
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Newest first."""
        return sorted((one for one in self._folder.glob("*.snapshot") if one.stem.isdecimal()), reverse=True)

    def load(self) -> list[tuple[Path, Snapshot]]:
        """Those that can be taken, newest first. Blocking."""
        found = []
        for path in self._files():
            try:
                found.append((path, self._read(path)))
            except FileNotFoundError:
                continue
            except (OSError, _Unusable) as error:
                drop(path, str(error))
        return found

    def _read(self, path: Path) -> Snapshot:
        with path.open("rb") as file:
            owner = os.fstat(file.fileno())
            data = file.read()
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o022:
            raise _Unusable("others may write it")
        body = data[len(MAGIC) + DIGEST :]
        if data[: len(MAGIC) + DIGEST] != MAGIC + hashlib.sha256(body).hexdigest().encode():
            raise _Unusable("it is damaged")
        try:
            found = msgspec.msgpack.decode(body, type=Snapshot)
        except msgspec.MsgspecError as error:
            raise _Unusable(f"it is of another form: {error}") from error
        if found.key != self._key:
            raise _Unusable("another release, another log or other settings made it")
        return found


def drop(path: Path, reason: str) -> None:
    """Say why a snapshot is of no use, and remove it."""
    log.warning("snapshot %s is dropped, the log is folded instead: %s", path, reason)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("snapshot %s can't be removed: %s", path, error)


async def unlike(event_log: EventLog, marks: Sequence[Mark]) -> str:
    """What says that the log is not the one that was folded; empty if nothing does."""
    answers = await asyncio.gather(*(_unlike(event_log, mark) for mark in marks))
    return next(filter(None, answers), "")


async def _unlike(event_log: EventLog, mark: Mark) -> str:
    place = f"{mark.topic}/{mark.partition}"
    first, end = await asyncio.gather(
        event_log.beginning(mark.topic, mark.partition), event_log.stable_end(mark.topic, mark.partition)
    )
    if first != mark.first:
        return f"{place} begins at {first}, expected {mark.first}"
    if end < mark.next:
        return f"{place} ends at {end}, expected {mark.next} or more"
    if mark.last >= 0:
        try:
            record = await event_log.read_ref(RecordRef(mark.topic, mark.partition, mark.last))
        except OffsetGap:
            return f"{place}@{mark.last} is no record any more"
        if leaf_of(record) != mark.leaf:
            return f"{place}@{mark.last} holds another record"
    return ""


def code_hash(*modules: str) -> str:
    """Of the sources of these modules and of all of ours that they import, however indirectly; of what else the bytes
    of a snapshot depend on."""
    sources = sources_of(modules)
    digest = hashlib.sha256(f"{sys.version} {msgspec.__version__} {sorted(sources)}".encode())
    for name in sorted(sources):
        digest.update(hashlib.sha256(sources[name]).digest())
    return digest.hexdigest()


def sources_of(modules: Iterable[str]) -> dict[str, bytes]:
    """By module its source. Reads import lines and imports nothing: a restart waits for it."""
    found: dict[str, bytes] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        path = _ROOT.joinpath(*name.split(".")[1:])
        file = next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
        if name in found or file is None:
            continue
        found[name] = file.read_bytes()
        for base, names, plain in _IMPORT.findall(found[name].decode()):
            pending += [plain] if plain else [base, *(f"{base}.{one}" for one in re.findall(r"\w+", names))]
    return found
