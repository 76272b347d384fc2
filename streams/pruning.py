"""Which versions a `version.pruned` record takes: one rule for trainer, controller and whoever shows versions.

A fold of weights.v1 in log order, so that a pin and a prune that cross are decided by their order, the same everywhere:
- the newest version, a pinned one and one that was rolled back to are not taken, whatever the record says;
- a pin of, or a roll-back to, a version that was taken before counts for nothing.
Taken versions stay part of the history; only what they hold is removed from the object store, afterwards.
"""

from __future__ import annotations

from collections.abc import Collection

from odradek.streams.events.weights import VersionPruned


def taken(event: VersionPruned, published: Collection[int], pinned: int | None, rolled_back_to: int | None) -> set[int]:
    """The versions that the record takes, given the fold of all records before it."""
    kept = {pinned, rolled_back_to, max(published, default=None)}
    return {version for version in event.versions if version in published and version not in kept}
