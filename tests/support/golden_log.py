"""Whole logs as older releases wrote them, and what those releases themselves made of them: `tests/golden/logs`.

NAME.msgpack.xz holds every record of a small real run by release NAME (`support.log_copy`), NAME.json the `facts` that
the same release's code found in it. Never renewed: a new release adds its own. With a run of the release kept up, and
the release's code first on the path:

    python -m support.golden_log write NAME BOOTSTRAP [PREFIX]

`facts BOOTSTRAP PREFIX` prints the facts of a log, and in `machine` which code paths the libraries took.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from array import array
from pathlib import Path
from typing import Any

from odradek.actors.session.state import SessionFold
from odradek.infra.cli.replay_work import rebuilt_batches
from odradek.streams import topics
from odradek.streams.assembly.v1.merkle import little_endian
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.config import KafkaConfig
from odradek.streams.events.sessions import WorkspaceDelta
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord
from odradek.streams.replay.export import Row, export
from odradek.streams.replay.rebuild import rebuild_all
from odradek.streams.replay.select import Filter
from support.log_copy import copied, save
from support.session_world import template

FOLDER = Path(__file__).parents[1] / "golden" / "logs"
LANE = "main-0"


async def facts(event_log: EventLog) -> dict[str, Any]:
    """Batches made again, sessions folded: what must never come out otherwise."""
    report = await rebuild_all(event_log, LANE)
    batches = await rebuilt_batches(event_log, LANE, None, lambda _text: None)
    by_session: dict[str, list[SessionRecord]] = {}
    for number, end in (await event_log.stable_ends(topics.SESSIONS.name)).items():
        async for record in event_log.read(topics.SESSIONS.name, number, 0, end):
            event = record.event
            by_session.setdefault(record.key or "", []).append((record.ref.offset, event.id, event.meta, event.body))
    return {
        "rebuilt": str(report),
        "batches": {one.batch_id: [one.members, one.tokens, one.trained_tokens, one.sha256] for one in batches},
        "export": await _exported(event_log),
        "sessions": {session: _session(session, records) for session, records in sorted(by_session.items())},
    }


def _session(session_id: str, records: list[SessionRecord]) -> dict[str, Any]:
    state = SessionFold(session_id, template()).apply_all(records)
    sequence = sequence_of(session_id, records)
    tokens = hashlib.sha256()
    for segment in sequence.segments:
        for name in ("tokens", "mask", "logprobs", "versions"):
            tokens.update(_bytes(getattr(segment, name)))
    usage = state.usage()
    return {
        "end": type(state.end).__name__,
        "turns": usage.turns,
        "calls": usage.calls,
        "failed_calls": usage.failed_calls,
        "sampled_tokens": usage.sampled_tokens,
        "context_tokens": usage.context_tokens,
        "versions": sorted(set(sequence.sampled_versions())),
        "tokens_sha256": tokens.hexdigest(),
        "workspace_sha256": _workspace(state.deltas),
    }


class _Rows:
    """A writer of rows that keeps what a training set is for."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, row: Row) -> None:
        kept = (row.session_id, row.tokens, row.mask, row.logprobs, row.versions, row.segment_starts, row.reward)
        self.sha.update(json.dumps([*kept, row.batch_id, row.advantage, row.task_id, row.end_reason]).encode())


async def _exported(event_log: EventLog) -> list[Any]:
    rows = _Rows()
    report = await export(event_log, Filter(), lambda _ids: "", rows)
    return [report.rows, report.tokens, dict(sorted(report.left_out.items())), rows.sha.hexdigest()]


def _bytes(values: array[Any]) -> bytes:
    return little_endian(values)


def _workspace(deltas: list[WorkspaceDelta]) -> str:
    found = hashlib.sha256()
    for delta in deltas:
        for change in delta.changes:
            found.update(f"{change.path}\0{change.kind}\0{change.mode}\0".encode() + change.content)
    return found.hexdigest()


async def _write(name: str, config: KafkaConfig) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    async with EventLog(config) as event_log:
        records = await copied(event_log)
        save(FOLDER / f"{name}.msgpack.xz", records)
        found = await facts(event_log)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(records)} records, {len(found['sessions'])} sessions, {found['rebuilt']}")


def machine() -> dict[str, Any]:
    """Which instruction set this process computes with, as its libraries say; of numpy, what is above its baseline."""
    import numpy as np
    import torch

    from odradek.kernels.numerics import numerics_id

    umath: Any = np._core._multiarray_umath  # type: ignore[attr-defined]
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "numpy": [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]],
        "numerics_id": numerics_id(),
    }


async def _facts(config: KafkaConfig) -> None:
    async with EventLog(config) as event_log:
        print(json.dumps({"facts": await facts(event_log), "machine": machine()}))


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    name = rest.pop(0) if what == "write" else ""
    where = KafkaConfig(bootstrap=rest[0], prefix=rest[1] if len(rest) > 1 else "")
    asyncio.run(_write(name, where) if what == "write" else _facts(where))
