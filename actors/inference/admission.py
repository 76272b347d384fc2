"""Which requests an engine can ever serve: checked once, before anything is queued. Pure."""

from __future__ import annotations

import math

from odradek.actors.inference.errors import ContextTooLongError, InvalidRequestError
from odradek.actors.inference.types import SampleRequest


def check_request(request: SampleRequest, vocab_size: int, context: int) -> None:
    """Raise the first reason why `request` is impossible; `context` is the most tokens that fit model and pool."""
    name, prompt = f"request {request.request_id}", request.prompt_tokens
    if not prompt or request.max_new_tokens < 1:
        raise InvalidRequestError(
            f"{name}: {len(prompt)} prompt tokens, max_new_tokens {request.max_new_tokens}; both must be at least 1"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidRequestError(f"{name}: token ids must lie in 0 to {vocab_size - 1}; is it the right tokenizer?")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise InvalidRequestError(f"{name}: temperature {request.temperature} must be finite and not negative")
    if not 0 <= request.seed < 2**64 or not 0 <= request.position_base < 2**63:
        raise InvalidRequestError(f"{name}: seed and position_base must be 64-bit and not negative")
    if room(request, context) < 1:
        raise ContextTooLongError(
            f"{name}: {len(prompt)} prompt tokens leave no room for one more in a context of {context}; condense it"
        )


def room(request: SampleRequest, context: int) -> int:
    """Tokens that can be sampled before the request's limit or the context ends."""
    return min(request.max_new_tokens, context - len(request.prompt_tokens))
