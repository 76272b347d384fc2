"""`TrainingBatch`: what the materialiser hands to the trainer, as plain arrays.

T tokens of S packed sequences. A sequence is one session, or one segment of a session whose context was condensed, from
its first prompt token; it is never split. Segments count as the one session that they are: `sessions`. Everything per
token is aligned with `tokens`: `sampler_logprobs[t]` is the log-prob of token t given what stands before it, and so is
the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from odradek.actors.trainer.errors import BatchError

PER_SEQUENCE: Final = ("seq_starts", "sessions", "experts")
"""Fields of a batch that have no entry for each token."""


@dataclass(frozen=True)
class TrainingBatch:
    """Packed sequences with what the objective needs to know of each token; checked when made."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    seq_starts: NDArray[np.int32]
    """`[S+1]`, ascending from 0 to T."""
    loss_mask: NDArray[np.bool_]
    """Sampled by the policy, within the staleness bound and consented to: these tokens are trained."""
    sampler_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    versions: NDArray[np.int32]
    """Weight version that sampled the token; of no meaning where `loss_mask` is unset."""
    sessions: NDArray[np.int32] | None = None
    """`[S]` the session of each sequence, any numbers; None: each is one of its own."""
    experts: tuple[bytes, ...] | None = None
    """`[S]` the experts that the sampler routed each sequence's tokens to, int16 [tokens, layers, top_k] of all tokens
    but the last; an empty one is not known. None: of none."""

    def __post_init__(self) -> None:
        total = len(self.tokens)
        for field in fields(self):
            if field.name not in PER_SEQUENCE and (length := len(getattr(self, field.name))) != total:
                raise BatchError(f"{field.name} has {length} entries, tokens has {total}")
        if self.sessions is not None and len(self.sessions) != self.sequences:
            raise BatchError(f"sessions has {len(self.sessions)} entries, there are {self.sequences} sequences")
        if self.experts is not None and len(self.experts) != self.sequences:
            raise BatchError(f"experts has {len(self.experts)} entries, there are {self.sequences} sequences")
        starts = self.seq_starts
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != total or (np.diff(starts) <= 0).any():
            raise BatchError(f"seq_starts must ascend from 0 to {total}, found {_brief(starts)}")
        if self.loss_mask[starts[:-1]].any():
            first = int(np.flatnonzero(self.loss_mask[starts[:-1]])[0])
            raise BatchError(f"the first token of sequence {first} is marked as trained, but nothing predicts it")
        for name in ("sampler_logprobs", "advantages"):
            bad = np.flatnonzero(self.loss_mask & ~np.isfinite(getattr(self, name)))
            if len(bad):
                raise BatchError(f"{name} of trained token {int(bad[0])} is not finite ({len(bad)} such tokens)")

    @property
    def sequences(self) -> int:
        return len(self.seq_starts) - 1

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence."""
        return np.diff(self.seq_starts).astype(np.int64)

    def trained_tokens(self) -> NDArray[np.int64]:
        """Trained tokens of each sequence."""
        cumulated = np.concatenate([[0], np.cumsum(self.loss_mask, dtype=np.int64)])
        counts: NDArray[np.int64] = cumulated[self.seq_starts[1:]] - cumulated[self.seq_starts[:-1]]
        return counts

    def session_of_sequence(self) -> NDArray[np.int64]:
        """The session of each sequence, numbered from 0 as they first appear, `[S]`."""
        if self.sessions is None:
            return np.arange(self.sequences)
        _, first, number = np.unique(self.sessions, return_index=True, return_inverse=True)
        appearance: NDArray[np.int64] = np.argsort(np.argsort(first))[number]
        return appearance

    def sequence_of_token(self) -> NDArray[np.int64]:
        """The sequence that each token belongs to, `[T]`."""
        return np.repeat(np.arange(self.sequences), self.lengths())

    def indices(self, sequences: Sequence[int]) -> NDArray[np.int64]:
        """Positions in this batch of the tokens of `sequences`, in that order."""
        spans = [np.arange(self.seq_starts[s], self.seq_starts[s + 1]) for s in sequences]
        return np.concatenate(spans) if spans else np.zeros(0, np.int64)

    def select(self, sequences: Sequence[int]) -> TrainingBatch:
        """The batch of these sequences, in this order."""
        at = self.indices(sequences)
        starts = np.concatenate([[0], np.cumsum(self.lengths()[list(sequences)])]).astype(np.int32)
        return TrainingBatch(
            self.tokens[at],
            self.positions[at],
            starts,
            self.loss_mask[at],
            self.sampler_logprobs[at],
            self.advantages[at],
            self.versions[at],
            None if self.sessions is None else self.sessions[list(sequences)],
            None if self.experts is None else tuple(self.experts[s] for s in sequences),
        )


def cut(lengths: Sequence[int], budget: int) -> list[range]:
    """Runs of adjacent sequences of at most `budget` tokens each; a longer sequence stands alone, never split."""
    runs: list[range] = []
    start = used = 0
    for i, n in enumerate(lengths):
        if i > start and used + n > budget:
            runs.append(range(start, i))
            start, used = i, 0
        used += n
    if start < len(lengths):
        runs.append(range(start, len(lengths)))
    return runs


def _brief(values: NDArray[np.int32]) -> str:
    shown = values.tolist()
    return str(shown) if len(shown) <= 8 else f"{shown[:4]} … {shown[-4:]}"
