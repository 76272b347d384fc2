"""Packing: which members share a micro-batch. Deterministic: the same lengths give the same layout on any host.

First-fit decreasing by tokens, ties by member index. A member longer than the budget has a micro-batch of its own and
is never cut. Members of a micro-batch keep their index order.
"""

from __future__ import annotations

from collections.abc import Sequence

from odradek.streams.events.batches import MicroBatch


def pack(lengths: Sequence[int], budget: int) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens, except single members that are longer.

    >>> [m.members for m in pack([5, 3, 4], 8)]
    [[0, 1], [2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    loads: list[int] = []
    for member in order:
        for at, load in enumerate(loads):
            if load + lengths[member] <= budget:
                bins[at].append(member)
                loads[at] += lengths[member]
                break
        else:
            bins.append([member])
            loads.append(lengths[member])
    return [MicroBatch(members=sorted(members), tokens=load) for members, load in zip(bins, loads, strict=True)]
