"""The canonical sequence of a session: what the model saw and wrote, token by token, from the log alone.

Guarantees: every sampled token appears exactly once and carries the version and log-probability it was sampled with;
ids, mask, log-probs and versions have equal length; text is never re-tokenised; a context that the template or a
summary rewrote starts a new segment. Pure; reads nothing but the records given.

Guarantee 6 (tests/GUARANTEES.md): test_assembly_v1.py, test_controller_core.py, test_engine_actor.py.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from odradek.streams.codec import read_f32, read_i32
from odradek.streams.errors import DecodeError
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import ContextSummarized, SessionCompleted, SessionFailed, TurnSampled
from odradek.streams.ownership import SessionRecord, accepted

N = TypeVar("N", int, float)

NO_VERSION = -1
"""Version of a token that nobody sampled (prompt, result)."""
TRUNCATED_ENDS = frozenset({"context", "turn_length", "turns", "wall_clock"})
"""Ends by a budget and not by the policy's own decision: flagged truncated, scored as they stand."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous context. All four arrays have the same length T.

    `tokens` int32; `mask` uint8, 1 where the policy sampled the token; `logprobs` float32 (0 where mask is 0);
    `versions` int32 (`NO_VERSION` where mask is 0).
    """

    tokens: array[int]
    mask: array[int]
    logprobs: array[float]
    versions: array[int]
    experts: bytearray = field(default_factory=bytearray)
    """Routed experts as the turns logged them, of all tokens but the last; empty where none were."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Sequence:
    """A session as training sees it."""

    session_id: str
    meta: Meta
    segments: list[Segment]
    truncated: bool
    failed: bool
    withheld: bool = False
    """Its reader could not see its content (the subject was erased, or no key is at hand): lengths, positions and
    versions are true, tokens and log-probs are zeros."""

    @property
    def tokens(self) -> int:
        """Tokens over all segments."""
        return sum(len(segment) for segment in self.segments)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(sum(segment.mask) for segment in self.segments)

    def sampled_versions(self) -> list[int]:
        """Versions of the sampled tokens, in order."""
        return [v for s in self.segments for v, m in zip(s.versions, s.mask, strict=True) if m]


class MalformedSession(ValueError):
    """The records do not make a sequence: the session is unfit for training, for ever."""


def _empty() -> Segment:
    return Segment(array("i"), array("B"), array("f"), array("i"))


def sequence_of(session_id: str, records: Iterable[SessionRecord]) -> Sequence:
    """The canonical sequence of a session's records (all of them, in log order).

    Raises MalformedSession if a turn's arrays are torn or disagree in length, its position does not follow the one
    before, a log-prob is not finite, or a sampled token stands first, where nothing predicts it: no trainer can use
    such a session, and it must not stop the lane.
    """
    segments = [_empty()]
    meta: Meta | None = None
    truncated = failed = withheld = False
    for offset, _, record_meta, body in accepted(records):
        meta = meta or record_meta
        withheld = withheld or record_meta.cipher is not None
        match body:
            case ContextSummarized():
                segments.append(_empty())
                _extend(segments[-1], _array(read_i32, body.prompt, f"session {session_id} at offset {offset}"))
            case TurnSampled():
                _turn(segments[-1], body, f"session {session_id} at offset {offset}")
            case SessionCompleted():
                truncated = body.reason in TRUNCATED_ENDS
            case SessionFailed():
                failed = True
            case _:
                pass
    if meta is None:
        raise MalformedSession(f"session {session_id}: no records")
    return Sequence(session_id, meta, [s for s in segments if len(s)], truncated, failed, withheld)


def _extend(segment: Segment, prompt: list[int]) -> None:
    segment.tokens.extend(prompt)
    segment.mask.extend([0] * len(prompt))
    segment.logprobs.extend([0.0] * len(prompt))
    segment.versions.extend([NO_VERSION] * len(prompt))


def _turn(segment: Segment, body: TurnSampled, where: str) -> None:
    prompt, completion = _array(read_i32, body.prompt, where), _array(read_i32, body.completion, where)
    logprobs = _array(read_f32, body.logprobs, where)
    if len(completion) != len(logprobs):
        raise MalformedSession(f"{where}: {len(completion)} sampled tokens, {len(logprobs)} log-probs")
    if body.position != len(segment):
        raise MalformedSession(f"{where}: turn {body.turn} starts at {body.position}, context has {len(segment)}")
    if not all(map(math.isfinite, logprobs)):
        raise MalformedSession(f"{where}: a log-prob of turn {body.turn} is not finite")
    if completion and not prompt and not len(segment):
        raise MalformedSession(f"{where}: turn {body.turn} was sampled from nothing: no token stands before it")
    _extend(segment, prompt)
    segment.experts.extend(body.experts)
    if body.copied_from is not None:
        # Of a fork: sampled in the parent, and trained there if anywhere.
        _extend(segment, completion)
        return
    segment.tokens.extend(completion)
    segment.mask.extend([1] * len(completion))
    segment.logprobs.extend(logprobs)
    segment.versions.extend(_versions(body, len(completion), where))


def _array(read: Callable[[bytes], list[N]], data: bytes, where: str) -> list[N]:
    try:
        return read(data)
    except DecodeError as error:
        raise MalformedSession(f"{where}: {error}") from None


def _versions(body: TurnSampled, count: int, where: str) -> list[int]:
    starts = [span.start for span in body.spans]
    if count and (not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= count):
        raise MalformedSession(f"{where}: weight spans {starts} do not cover {count} tokens")
    ends = [*starts[1:], count]
    return [span.version for span, end in zip(body.spans, ends, strict=True) for _ in range(end - span.start)]
