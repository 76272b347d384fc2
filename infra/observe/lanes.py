"""A run's fold, lane by lane: what one lane opened, sealed, batched and trained, and how the policy it trains does.

Two lanes of one log may train two policies, or one on two objectives, and each numbers its versions from its own start:
counted together they say nothing. An evaluation belongs to the lanes of the policy that it evaluates; what a policy's
replicas report, to all of its lanes; a graded session, to the lane that opened its group. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.frame import VersionRow, version_rows
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed, LaneConfigured
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardRevised, RewardUngraded

Folded = tuple[RecordRef, str, Meta, Any, int]
"""What `RunFold.apply` takes."""


class LaneFolds:
    """By lane its fold. Records come as to a `RunFold`: every group before the rewards."""

    def __init__(self) -> None:
        self.folds: dict[str, RunFold] = {}
        self._lanes: dict[str, list[str]] = defaultdict(list)
        """By policy."""
        self._opened: dict[str, GroupOpened] = {}
        self._evaluations: dict[str, list[Folded]] = defaultdict(list)
        """By policy what groups.v1 says of its evaluations: they lie in a partition of their own, and a lane may be
        configured behind them."""

    def apply(self, *record: *Folded) -> None:
        """Fold one record into the lanes it belongs to."""
        body = record[3]
        if isinstance(body, GroupOpened):
            self._opened.setdefault(body.group_id, body)
        if isinstance(body, LaneConfigured) and body.lane not in self._lanes[body.policy]:
            self._lanes[body.policy].append(body.lane)
            self.folds[body.lane] = RunFold()
            for earlier in self._evaluations[body.policy]:
                self.folds[body.lane].apply(*earlier)
        evaluated = self._evaluated(body)
        if evaluated and isinstance(body, GroupOpened | GroupSealed | GroupDiscarded):
            self._evaluations[evaluated].append(record)
        for lane in self._lanes[evaluated] if evaluated else self._whose(body):
            if lane in self.folds:
                self.folds[lane].apply(*record)

    def _evaluated(self, body: Any) -> str:
        """The policy that an evaluation's record is about; empty for anything else."""
        group = self._opened.get(getattr(body, "group_id", ""))
        return group.policy if group is not None and group.purpose == "eval" else ""

    def _whose(self, body: Any) -> list[str]:
        if isinstance(body, RewardAssigned | RewardRevised | RewardUngraded):
            group = self._opened.get(body.group_id)
            return [] if group is None else [group.lane]
        if lane := getattr(body, "lane", ""):
            return [lane]
        return self._lanes.get(getattr(body, "policy", ""), [])


class LaneLine(msgspec.Struct, frozen=True):
    """One lane in numbers; evaluations of its policy are groups too."""

    lane: str
    policy: str
    groups: int
    """Opened."""
    sealed: int
    discarded: dict[str, int]
    """By reason; tasks that were refused included."""
    left_out: dict[str, int]
    """Sealed and not trained on, by reason."""
    batches: int
    steps: int
    versions: list[VersionRow]


def lane_line(lane: str, fold: RunFold) -> LaneLine:
    """The lane's numbers."""
    return LaneLine(
        lane=lane,
        policy=fold.lanes[lane].policy,
        groups=len(fold.groups),
        sealed=fold.sealed,
        discarded=dict(fold.discarded),
        left_out=dict(fold.dropped),
        batches=len(fold.batches),
        steps=len(fold.steps),
        versions=version_rows(fold),
    )


def lane_text(line: LaneLine) -> str:
    """One line of counts, and one for each rate that has an earliest and a newest version."""
    discarded = ", ".join(f"{count} {reason}" for reason, count in sorted(line.discarded.items()))
    left_out = ", ".join(f"{count} {reason}" for reason, count in sorted(line.left_out.items()))
    counts = f"{line.groups} groups opened, {line.sealed} sealed, {sum(line.discarded.values())} discarded"
    counts += f" ({discarded})" if discarded else ""
    counts += f"; left out of batches: {left_out}" if left_out else ""
    lines = [f"{line.lane} (policy {line.policy}): {counts}; {line.batches} batches, {line.steps} steps"]
    rates = {"RL rollouts": {row.version: row.training for row in line.versions if row.training.count}}
    for row in line.versions:
        for name, rate in row.held_out.items():
            rates.setdefault(f"held out {name}", {})[row.version] = rate
    for what, by_version in rates.items():
        said = [f"{one.solved} of {one.count} at version {version}" for version, one in sorted(by_version.items())]
        lines += [f"  {what} solved: {' → '.join(dict.fromkeys([said[0], said[-1]]))}"] if said else []
    return "\n".join(lines)
