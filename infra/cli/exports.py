"""Where exported sessions of people were written, and taking somebody out of such files.

The ledger is a file of the data folder. A line is written before the export itself, so that a file which an export that
was killed left half-written is known too. Not a command of its own.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from odradek.streams.privacy.report import StoreReport

LEDGER = "exports.jsonl"


class Exported(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file."""

    path: str
    form: str
    time_ms: int = 0
    gone: bool = False
    """A person said that it, and every copy of it, is gone."""


def note(data: Path, path: Path, form: str, *, gone: bool = False) -> None:
    """Remember a file; durable on return."""
    data.mkdir(parents=True, exist_ok=True)
    line = Exported(path=str(path.absolute()), form=form, time_ms=int(time.time() * 1000), gone=gone)
    descriptor = os.open(data / LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def noted(data: Path) -> list[Exported]:
    """The newest word on each file, in the order of the first."""
    found: dict[str, Exported] = {}
    try:
        lines = (data / LEDGER).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        one = msgspec.json.decode(line, type=Exported)
        found[one.path] = one
    return list(found.values())


class ExportedFiles:
    """A `LocalStore`: takes a subject's rows out of the files that this data folder knows of."""

    def __init__(self, data: Path) -> None:
        self._data = data

    async def erase(self, subject: str, sessions: frozenset[str]) -> StoreReport:
        """See `LocalStore`."""
        return await asyncio.to_thread(self._erase, sessions)

    def _erase(self, sessions: frozenset[str]) -> StoreReport:
        removed, missing = 0, []
        for one in noted(self._data):
            path = Path(one.path)
            path.with_name(f".{path.name}.partial").unlink(missing_ok=True)
            if path.exists():
                removed += without(path, one.form, sessions)
            elif not one.gone:
                missing.append(one.path)
        if missing:
            detail = f"{', '.join(missing)}: not where it was written; erase every copy, then say so by --gone PATH"
            return StoreReport(store="exports", state="unreachable", detail=detail)
        return StoreReport(
            store="exports", state="deleted" if removed else "none", detail=f"{removed} rows removed" if removed else ""
        )


def without(path: Path, form: str, sessions: Collection[str]) -> int:
    """Take the rows of these sessions out of an exported file, in place; returns how many there were."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        removed = (_jsonl if form == "jsonl" else _parquet)(path, partial, sessions)
        if removed:
            partial.replace(path)
        return removed
    finally:
        partial.unlink(missing_ok=True)


def _jsonl(path: Path, partial: Path, sessions: Collection[str]) -> int:
    class Id(msgspec.Struct):
        session_id: str

    removed = 0
    with path.open("rb") as lines, partial.open("wb") as kept:
        for line in lines:
            if msgspec.json.decode(line, type=Id).session_id in sessions:
                removed += 1
            else:
                kept.write(line)
    return removed


def _parquet(path: Path, partial: Path, sessions: Iterable[str]) -> int:
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    removed = 0
    with (
        parquet.ParquetFile(path) as file,
        parquet.ParquetWriter(partial, file.schema_arrow, compression="zstd") as kept,
    ):
        wanted = pa.array(sorted(sessions), pa.string())
        for batch in file.iter_batches():
            theirs = compute.is_in(batch.column("session_id"), value_set=wanted)
            removed += theirs.true_count
            kept.write_batch(batch.filter(compute.invert(theirs)))
    return removed
