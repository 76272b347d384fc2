"""Prefixes that packed sequences share, so that the trunk computes each only once.

The attempts of one group open with the same task, a fork repeats its parent's turns. A causal decoder gives a token
that stands after equal tokens at equal positions the same hidden state, whatever follows: such tokens are one row. Only
attention expands rows to tokens.

Guarantee: as a row's bits do not depend on the rows beside it (`kernels.rows`), the hidden states of shared and
unshared packing are equal bit for bit; a sequence sees no token of another one. Gradients of shared rows are summed, so
they agree up to rounding.

T tokens of S packed sequences, U <= T rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SharedRows:
    """`first` `[U]`: the token that stands for a row. `of_token` `[T]`: the row of each token. Both int64, ascending
    in order of first occurrence."""

    first: Tensor
    of_token: Tensor

    @property
    def any(self) -> bool:
        """Whether any token shares its row with another."""
        return len(self.first) < len(self.of_token)


def shared_rows(tokens: Tensor, positions: Tensor, seq_starts: Tensor) -> SharedRows:
    """One row for each different (prefix, token, position): a walk down a prefix tree, a step a token."""
    ids, places, bounds = tokens.tolist(), positions.tolist(), seq_starts.tolist()
    tree: dict[tuple[int, int, int], int] = {}
    first: list[int] = []
    of_token: list[int] = []
    for start, end in itertools.pairwise(bounds):
        row = -1
        for at in range(start, end):
            step = (row, ids[at], places[at])
            row = tree.setdefault(step, len(first))
            if row == len(first):
                first.append(at)
            of_token.append(row)
    return SharedRows(torch.tensor(first, dtype=torch.long), torch.tensor(of_token, dtype=torch.long))
