"""Sampled tokens as the log has them, each with the version that sampled it and all that its log-probability hangs on.

Pure; reads tokens and spans from the records, and none of the code that assembles or trains.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from odradek.streams.codec import read_i32
from odradek.streams.events.sessions import ContextSummarized, SessionOpened, TurnSampled
from support.crash.world import Seen, World

WIDTH = 4
"""Bytes of a token id, and of a log-probability."""


class Sampled(NamedTuple):
    """One sampled token."""

    seen: Seen
    index: int
    """In its turn."""
    given: bytes
    """Digest of policy, version, `numerics_id` and every token of the context, this one included. Keys and values of
    an older version are computed again at a reload, so the context's own versions are no part of it."""
    logprob: bytes
    """float32 as it is stored: what is promised is promised of the bits."""


def token_versions(turn: TurnSampled) -> list[int] | None:
    """The weight version of each sampled token; None where the spans do not say it of every token."""
    count, starts = len(read_i32(turn.completion)), [span.start for span in turn.spans]
    if not count:
        return []
    if not starts or starts[0] != 0 or sorted(set(starts)) != starts or starts[-1] >= count:
        return None
    ends = [*starts[1:], count]
    return [span.version for span, end in zip(turn.spans, ends, strict=True) for _ in range(end - span.start)]


def sampled(world: World) -> Iterator[Sampled]:
    """Every sampled token whose whole context can be read, session by session."""
    for records in world.accepted.values():
        opened = records[0].body if records else None
        if isinstance(opened, SessionOpened):
            yield from _of_session(opened.policy, records)


def _of_session(policy: str, records: list[Seen]) -> Iterator[Sampled]:
    context, length = hashlib.blake2b(digest_size=16), 0
    for seen in records:
        body = seen.body
        if seen.meta.cipher is not None:
            continue  # withheld: the next turn's position shows that something is missing
        if isinstance(body, ContextSummarized):
            context, length = hashlib.blake2b(body.prompt, digest_size=16), len(body.prompt) // WIDTH
        if not isinstance(body, TurnSampled):
            continue
        if body.position == 0:
            context, length = hashlib.blake2b(digest_size=16), 0
        versions = token_versions(body)
        if versions is None or body.position != length:
            return
        context.update(body.prompt)
        length += (len(body.prompt) + len(body.completion)) // WIDTH
        for index, version in enumerate(versions):
            at = slice(WIDTH * index, WIDTH * (index + 1))
            context.update(body.completion[at])
            given = context.copy()
            given.update(struct.pack(">q", version) + f"{policy}\n{body.numerics_id}".encode())
            if len(body.logprobs[at]) == WIDTH:
                yield Sampled(seen, index, given.digest(), body.logprobs[at])
