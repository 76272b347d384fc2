"""Tuning of one engine: frozen, unknown keys refused, each number with its unit and its two wrong directions."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from odradek.actors.inference.pages import PAGE_SIZE
from odradek.actors.policy.config import ModelConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The defaults suit the demo policy on one core."""

    max_running: Positive = 128
    """Requests decoded together. Too low: rows of each matmul stay empty; too high: each one's next token is later."""

    num_pages: Positive | None = None
    """64-token pages of keys and values; None: five quarters of what `max_running` whole contexts need (1.3 MB each
    for the demo policy), as far as `kv_memory_bytes` goes. Too few: long requests preempt each other and sessions lose
    their cache between turns; more than the sessions in flight need is memory for nothing."""

    kv_memory_bytes: Positive = 1024 * 1024 * 1024
    """Most memory for those pages where `num_pages` is None."""

    chunk_tokens: Positive = 256
    """Most prompt tokens of one request in one step. Too low: long prompts take many steps, each with a fixed cost; too
    high: one long prompt delays every other request's next token."""

    prefill_budget: Positive = 1024
    """Prompt tokens of all requests in one step (about 100 ms for the demo policy on one core). Too low: requests wait
    for their first token while rows stay empty; too high: running requests stall at every arrival."""

    kv_on_reload: Literal["recompute", "keep"] = "recompute"
    """What happens to keys and values of older weights: computed again, or kept, with the result marked `mixed`."""

    keep_versions: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Versions held beside pinned ones. Below 2 a request pinned to the version before the current one would fail at
    every reload; each more costs one copy of the weights as published and one as computed."""


KV_BYTES: Final = 4
"""Bytes of one number of keys and values: float32."""


def pages_of(config: ModelConfig, settings: EngineSettings) -> int:
    """Pages of an engine, the reserved one included."""
    if settings.num_pages is not None:
        return settings.num_pages
    wanted = settings.max_running * -(-config.max_position_embeddings // PAGE_SIZE) * 5 // 4 + 1
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * KV_BYTES
    return max(2, min(wanted, settings.kv_memory_bytes // (PAGE_SIZE * of_token)))


def context_of(config: ModelConfig, settings: EngineSettings) -> int:
    """Tokens that one request can have: the model's positions, or all pages if they hold fewer."""
    return min(config.max_position_embeddings, (pages_of(config, settings) - 1) * PAGE_SIZE)
