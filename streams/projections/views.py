"""Rows merged into what people and the curriculum look at. Pure; nothing here is stored."""

import math
from collections import Counter

import msgspec

from odradek.streams.projections.tables import CURRICULUM, GROUPS, REWARDS, UTILISATION, GroupRow, RewardRow, Rows

OTHER = GroupRow(lane="", purpose="production")
"""Stands for the group of a session that has none: a person's."""

SET_LABEL = "set"
"""The task label that names a held-out set."""


class LaneView(msgspec.Struct):
    """Groups of one lane."""

    open: int = 0
    sealed: int = 0
    discarded: dict[str, int] = {}
    """By reason."""
    replaced_members: int = 0
    dropped_tokens: list[int] = []
    """Length distribution of what was dropped, sorted."""


class VersionView(msgspec.Struct):
    """Graded sessions of one purpose (and task set) whose newest tokens came from one weight version."""

    purpose: str
    task_set: str
    version: int
    sessions: int
    mean_total: float
    mean_components: dict[str, float]
    sampled_tokens: int
    parallel_turn_share: float
    reads_before_edit_share: float | None
    """Of the sessions that edited; None if none did."""


class TaskView(msgspec.Struct):
    """Solve rate of one task over all graded attempts."""

    attempts: int
    solved: float

    @property
    def rate(self) -> float:
        """Share of solved attempts."""
        return self.solved / self.attempts if self.attempts else 0.0


class MinuteView(msgspec.Struct):
    """One minute of event time over all partitions; sums as in `UtilisationRow`."""

    minute: int
    counts: dict[str, float]


class Snapshot(msgspec.Struct):
    """Everything that `odradek watch` shows of the tables."""

    lanes: dict[str, LaneView]
    versions: list[VersionView]
    tasks: dict[str, TaskView]
    utilisation: list[MinuteView]
    ungraded: dict[str, int]
    """Failed gradings by cause."""


def lanes(groups: Rows) -> dict[str, LaneView]:
    """Groups by lane."""
    found: dict[str, LaneView] = {}
    for _, row in GROUPS.rows(groups):
        view = found.setdefault(row.lane, LaneView(discarded={}, dropped_tokens=[]))
        view.open += row.status == "open"
        view.sealed += row.status == "sealed"
        view.replaced_members += row.replaced
        if row.status == "discarded":
            view.discarded[row.reason] = view.discarded.get(row.reason, 0) + 1
            view.dropped_tokens = sorted([*view.dropped_tokens, *row.dropped_tokens])
    return dict(sorted(found.items()))


def versions(groups: Rows, rewards: Rows) -> list[VersionView]:
    """Reward and behaviour by purpose, task set and weight version."""
    by_group = dict(GROUPS.rows(groups))
    sorted_out: dict[tuple[str, str, int], list[RewardRow]] = {}
    for _, row in REWARDS.rows(rewards):
        if row.graded:
            group = by_group.get(row.group_id, OTHER)
            key = (group.purpose or OTHER.purpose, group.labels.get(SET_LABEL, ""), row.version)
            sorted_out.setdefault(key, []).append(row)
    return [_version(*key, rows) for key, rows in sorted(sorted_out.items())]


def _version(purpose: str, task_set: str, version: int, rows: list[RewardRow]) -> VersionView:
    names = sorted({name for row in rows for name in row.components})
    edited = [row.reads_before_edit for row in rows if row.reads_before_edit is not None]
    turns = sum(row.turns for row in rows)
    return VersionView(
        purpose=purpose,
        task_set=task_set,
        version=version,
        sessions=len(rows),
        mean_total=math.fsum(row.total for row in rows) / len(rows),
        mean_components={name: math.fsum(row.components.get(name, 0.0) for row in rows) / len(rows) for name in names},
        sampled_tokens=sum(row.sampled_tokens for row in rows),
        parallel_turn_share=sum(row.parallel_turns for row in rows) / turns if turns else 0.0,
        reads_before_edit_share=sum(edited) / len(edited) if edited else None,
    )


def tasks(groups: Rows, curriculum: Rows) -> dict[str, TaskView]:
    """Solve rates by task: what the curriculum asks for."""
    by_group = dict(GROUPS.rows(groups))
    attempts: dict[str, dict[str, float]] = {}
    for group_id, row in CURRICULUM.rows(curriculum):
        if group_id in by_group:
            attempts.setdefault(by_group[group_id].task_id, {}).update(row.solved)
    return {
        task: TaskView(attempts=len(solved), solved=math.fsum(solved.values()))
        for task, solved in sorted(attempts.items())
    }


def utilisation(rows: Rows) -> list[MinuteView]:
    """Minutes in order, partitions summed."""
    minutes: dict[int, dict[str, list[float]]] = {}
    for minute, row in UTILISATION.rows(rows):
        sums = minutes.setdefault(int(minute), {})
        for name, value in msgspec.structs.asdict(row).items():
            sums.setdefault(name, []).append(value)
    return [
        MinuteView(minute=minute, counts={name: math.fsum(values) for name, values in sums.items()})
        for minute, sums in sorted(minutes.items())
    ]


def snapshot(tables: dict[str, Rows]) -> Snapshot:
    """All views of all tables."""
    causes = Counter(cause for _, row in REWARDS.rows(tables["rewards"]) for cause in row.ungraded)
    return Snapshot(
        lanes=lanes(tables["groups"]),
        versions=versions(tables["groups"], tables["rewards"]),
        tasks=tasks(tables["groups"], tables["curriculum"]),
        utilisation=utilisation(tables["utilisation"]),
        ungraded=dict(sorted(causes.items())),
    )
