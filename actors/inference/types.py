"""What crosses the border of an engine: requests, results, statistics.

Frozen msgspec structs without torch types, so that a session actor can build them without importing torch.
`SampleRequest.prompt_tokens` is always the whole context; which part of it is cached is the engine's business alone.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final, Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]

MIXED_NUMERICS: Final = "mixed"
"""`numerics_id` of a result whose keys and values come from more than one weight version: no equality is claimed."""


class Priority(IntEnum):
    """Who is served first; RL fills what production leaves."""

    PRODUCTION = 0
    RL = 1


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn to sample."""

    request_id: str
    session_id: str
    epoch: int
    """Offset of the owner's opening record; the highest seen for a session wins."""
    prompt_tokens: list[int]
    position_base: int = 0
    """Session position of `prompt_tokens[0]`: not 0 after the context was condensed, so that no random number is
    drawn twice in a session."""
    max_new_tokens: int
    stop_ids: frozenset[int]
    """Sampling one of these ends the turn; it is part of the result."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    seed: int
    """Of the session; the token at session position p depends on (seed, p) and on nothing else of the batch."""
    priority: Priority = Priority.RL
    pinned_version: int | None = None
    """Sample wholly under this weight version; None follows the current one, reloads included."""
    deadline: float = math.inf
    """By the monotonic clock of the process that samples; past it the request fails with `DeadlineExceededError`."""


class SampleResult(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled turn; `tokens` and `logprobs` have equal length."""

    request_id: str
    session_id: str
    epoch: int
    tokens: list[int]
    logprobs: list[float]
    """float32 values, of the temperature-1 distribution, whatever the sampling temperature."""
    weight_spans: list[tuple[int, int]]
    """(first index in `tokens`, weight version), ascending, first index 0; empty when nothing was sampled."""
    finish_reason: FinishReason
    numerics_id: str
    cached_tokens: int
    """Prompt tokens whose keys and values were reused at first admission."""
    experts: bytes = b""
    """int16 [context tokens computed, layers, top_k] from context position 0 (the last sampled token was never fed);
    after a reload, the routing of the last computation. Empty for a dense model."""
    kv_spans: list[tuple[int, int]] = []
    """(first context position, weight version) of the keys and values; only when they are mixed."""
    queue_seconds: float = 0.0
    """From `add` to first admission."""
    prefill_seconds: float = 0.0
    """From first admission to the first token."""
    decode_seconds: float = 0.0
    """From the first token to the last."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's load and counters since start; rates are differences of two of these."""

    version: int | None
    versions: list[int]
    running: int
    waiting: int
    pages_used: int
    """Pages that running requests hold; parked and cached pages are reclaimable and not counted."""
    pages_total: int
    parked_sessions: int
    steps: int
    prompt_tokens: int
    """Prompt tokens of admitted requests."""
    cached_tokens: int
    """Of those, reused."""
    prefill_tokens: int
    """Tokens computed beyond one a row: prompts, and recomputation after a reload or a preemption."""
    sampled_tokens: int
    preemptions: int
    finished: int
    failed: int
    reloads: int
    busy_seconds: float
    """Time spent inside steps."""
