"""Pieces of a training sequence and the per-token weights of the warm start's loss."""

from collections.abc import Sequence

import msgspec

CONTEXT_WEIGHT = 0.08
"""Loss weight of a token the agent did not write. Higher spends the small model on predicting random names."""

RECURRED_WEIGHT = 0.5
"""The same where (previous token, token) occurred before in the sequence: this teaches copying. Twice as much made
edits that change nothing."""


class Segment(msgspec.Struct, frozen=True):
    """Tokens written by the agent (`is_agent`) or by the template. An agent's segment that is not `trained` is a
    mistake shown for its recovery: it is context without any weight."""

    token_ids: list[int]
    is_agent: bool
    trained: bool = True


class Example(msgspec.Struct, frozen=True):
    """One training sequence. `agent_mask` marks trained agent tokens. `context_weight` is the loss weight of every
    token as the target of its predecessor: 1 on agent tokens, else `CONTEXT_WEIGHT` or `RECURRED_WEIGHT`, 0 on an
    untrained mistake."""

    token_ids: list[int]
    agent_mask: list[bool]
    context_weight: list[float]


def example(segments: Sequence[Segment]) -> Example:
    """Join segments and weigh their tokens."""
    ids: list[int] = []
    mask: list[bool] = []
    weights: list[float] = []
    seen: set[tuple[int, int]] = set()
    previous = -1
    for segment in segments:
        trained_agent = segment.is_agent and segment.trained
        for token in segment.token_ids:
            recurred = (previous, token) in seen
            seen.add((previous, token))
            previous = token
            if trained_agent:
                weights.append(1.0)
            elif segment.trained:
                weights.append(RECURRED_WEIGHT if recurred else CONTEXT_WEIGHT)
            else:
                weights.append(0.0)
        ids += segment.token_ids
        mask += [trained_agent] * len(segment.token_ids)
    return Example(ids, mask, weights)
