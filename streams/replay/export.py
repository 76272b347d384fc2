"""The training set: one row a session, made from the log alone; `formats.py` writes it as Parquet or JSON lines.

A row holds what the trainer would see (tokens, mask, log-probs, versions: `assembly`'s own sequence), what graders and
the assembler said, and the session as text for people. Rows come in order of (partition, first offset); the same filter
on the same log gives the same rows. `Row` is the schema.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from odradek.streams.assembly.reader import Extent, read_sessions
from odradek.streams.assembly.v1.sequence import MalformedSession, sequence_of
from odradek.streams.assembly.v1.sequence import Sequence as Tokens
from odradek.streams.codec import read_i32
from odradek.streams.errors import DecodeError
from odradek.streams.events.sessions import (
    MessageReceived,
    SessionCompleted,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord, accepted
from odradek.streams.replay.select import Filter, Say, Selected, select

CHUNK = 64
"""Sessions read, and Parquet rows buffered, at a time. Too few: partitions are read in many small pieces. Too many:
memory (a session of 100k tokens takes about 2 MB here)."""

Decode = Callable[[Sequence[int]], str]
"""Token ids to text for people, special tokens by name."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the session as text, in log order."""

    kind: Literal["message", "turn", "call", "result"]
    turn: int
    """Number of the turn it belongs to; -1 for a message."""
    name: str = ""
    """Role of a message, tool of a call or result."""
    text: str
    """A message as received; a turn decoded from its tokens; a call's arguments as JSON; a result as shown."""
    is_error: bool = False


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One session. The four token arrays have the same length; a value of a token nobody sampled is 0 (mask,
    log-prob) or -1 (version)."""

    session_id: str
    origin: str
    tenant: str
    policy: str
    lane: str
    group_id: str
    attempt: int
    task_id: str
    task: str
    """Coordinates of the task's record; empty for a production session."""
    labels: dict[str, str]
    partition: int
    first_offset: int
    last_offset: int
    """Of the session's records on sessions.v1, both inclusive."""
    opened_ms: int
    """Record time of session.opened, milliseconds since 1970."""
    end_reason: str
    truncated: bool
    """Ended by a budget."""
    tokenizer: str
    """sha256 of the tokenizer file that the ids belong to."""
    template: str
    tokens: list[int]
    mask: list[int]
    """1 where the policy sampled the token."""
    logprobs: list[float]
    """Under the version that sampled the token; float32."""
    versions: list[int]
    segment_starts: list[int]
    """Where contexts begin in the arrays: 0, and after each rewritten context."""
    oldest_version: int
    newest_version: int
    reward: float | None
    """The total; none where the session has no verdict."""
    reward_components: dict[str, float]
    grader: str
    grader_version: str
    tests_passed: list[str]
    tests_failed: list[str]
    batch_id: str
    """The batch that trained on it; empty if none did."""
    batch_ordinal: int
    advantage: float | None
    transcript: list[Part]


@dataclass(slots=True)
class ExportReport:
    """What was written."""

    rows: int = 0
    tokens: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class RowWriter(Protocol):
    """Takes rows in order."""

    def write(self, row: Row) -> None:
        """Add one row."""


async def export(
    event_log: EventLog, wanted: Filter, decode: Decode, writer: RowWriter, say: Say = lambda _text: None
) -> ExportReport:
    """Write every wanted session to `writer`."""
    selection = await select(event_log, wanted, say)
    report = ExportReport(left_out=selection.left_out)
    async for one, records in _with_records(event_log, selection.sessions):
        try:
            row = _row(one, records, decode) if records is not None else None
        except (MalformedSession, DecodeError):
            row = None
        if row is None:
            report.left_out["undecodable"] += 1
        elif not _versions_fit(wanted, row):
            report.left_out["versions"] += 1
        else:
            writer.write(row)
            report.rows += 1
            report.tokens += len(row.tokens)
            say(f"{report.rows} of at most {len(selection.sessions)} sessions written")
    return report


async def _with_records(
    event_log: EventLog, sessions: list[Selected]
) -> AsyncIterator[tuple[Selected, list[SessionRecord] | None]]:
    for at in range(0, len(sessions), CHUNK):
        chunk = sessions[at : at + CHUNK]
        extents = [Extent(one.session_id, one.partition, one.first_offset, one.last_offset) for one in chunk]
        found = await read_sessions(event_log, extents)
        for one in chunk:
            yield one, found.get(one.session_id)


def _versions_fit(wanted: Filter, row: Row) -> bool:
    if wanted.versions is None:
        return True
    low, high = wanted.versions
    sampled = 1 in row.mask
    return sampled and low <= row.oldest_version and row.newest_version <= high


def _row(one: Selected, records: list[SessionRecord], decode: Decode) -> Row:
    sequence = sequence_of(one.session_id, records)
    sampled = sequence.sampled_versions()
    reward = one.reward
    end = next((body for *_, body in accepted(records) if isinstance(body, SessionCompleted)), None)
    if end is None:
        raise MalformedSession(f"session {one.session_id}: its owner never ended it")
    return Row(
        session_id=one.session_id,
        origin=one.meta.origin,
        tenant=one.meta.tenant,
        policy=one.opened.policy,
        lane=one.opened.lane,
        group_id=one.opened.group_id,
        attempt=one.opened.attempt,
        task_id=one.group.task_id if one.group is not None else "",
        task=str(one.opened.task) if one.opened.task is not None else "",
        labels=one.group.labels if one.group is not None else {},
        partition=one.partition,
        first_offset=one.first_offset,
        last_offset=one.last_offset,
        opened_ms=one.opened_ms,
        end_reason=end.reason,
        truncated=sequence.truncated,
        tokenizer=one.opened.tokenizer,
        template=one.opened.template,
        **_arrays(sequence),
        oldest_version=min(sampled, default=-1),
        newest_version=max(sampled, default=-1),
        reward=reward.total if reward is not None else None,
        reward_components=dict(reward.components) if reward is not None else {},
        grader=reward.grader if reward is not None else "",
        grader_version=reward.grader_version if reward is not None else "",
        tests_passed=list(reward.tests_passed) if reward is not None else [],
        tests_failed=list(reward.tests_failed) if reward is not None else [],
        batch_id=one.batch.batch_id if one.batch is not None else "",
        batch_ordinal=one.batch.ordinal if one.batch is not None else -1,
        advantage=one.member.advantage if one.member is not None else None,
        transcript=list(transcript(records, decode)),
    )


def _arrays(sequence: Tokens) -> dict[str, list[Any]]:
    """The token arrays of all segments, one after another."""
    arrays: dict[str, list[Any]] = {name: [] for name in ("tokens", "mask", "logprobs", "versions")}
    starts: list[int] = []
    for segment in sequence.segments:
        starts.append(len(arrays["tokens"]))
        for name, values in arrays.items():
            values.extend(getattr(segment, name))
    return {**arrays, "segment_starts": starts}


def transcript(records: Iterable[SessionRecord], decode: Decode) -> Iterable[Part]:
    """A session as text, from its accepted records."""
    names: dict[str, str] = {}
    for _, _, _, body in accepted(records):
        match body:
            case MessageReceived():
                yield Part(kind="message", turn=-1, name=body.role, text=body.text)
            case TurnSampled():
                yield Part(kind="turn", turn=body.turn, text=decode(read_i32(body.completion)))
            case ToolRequested():
                names[body.call_id] = body.name
                arguments = msgspec.json.encode(body.arguments, order="deterministic").decode()
                yield Part(kind="call", turn=body.turn, name=body.name, text=arguments)
            case ToolCompleted():
                name = names.get(body.call_id, "")
                yield Part(kind="result", turn=body.turn, name=name, text=body.text, is_error=body.is_error)
            case _:
                pass
