"""One picture of what goes on: the log's folds and the actors' own words, as plain data for a screen or a program.

Pure. Each number says what it counts in its docstring; the names are the keys of `watch --json`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from odradek.infra.demo.intervals import wilson
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.fold import Conduct, RunFold
from odradek.infra.observe.sessions import SessionBook

WINDOW_S = 30.0
"""Seconds over which rates are taken. Too short jumps with each turn; too long hides a stall."""


class Rate(msgspec.Struct, frozen=True):
    """Successes of trials, with a 95 % Wilson interval."""

    solved: int
    count: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        return self.solved / self.count if self.count else 0.0


class VersionRow(msgspec.Struct, frozen=True):
    """What was seen of one weight version."""

    version: int
    training: Rate
    """Graded RL sessions whose oldest token it sampled."""
    reward: float
    """Their mean total."""
    reads_before_edit: float
    """Share of those that edited which had read the file first."""
    parallel_turns: float
    """Share of turns with calls side by side."""
    held_out: dict[str, Rate]
    """By evaluation set."""


class Lag(msgspec.Struct, frozen=True):
    """What a consumer has not handled yet."""

    consumer: str
    count: int
    what: str


class Wait(msgspec.Struct, frozen=True):
    """The oldest wait of a host of sessions."""

    seconds: float
    what: str
    host: str


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    time_ms: int
    version: int | None
    """The current weight version."""
    in_flight: dict[str, int]
    """Sessions opened and not ended, by origin; those of closed groups are not counted."""
    window_s: float
    tool_calls_per_s: float
    turns_per_s: float
    sampled_tokens_per_s: float
    open_groups: int
    sealed_groups: int
    discarded: dict[str, int]
    """Groups given up by the controller, by reason."""
    left_out: dict[str, int]
    """Sealed groups that assembly did not train on, by reason."""
    batches: int
    steps: int
    versions: list[VersionRow]
    lags: list[Lag]
    staleness: dict[int, int]
    """Members of batches by versions between their oldest token and the version that was trained."""
    waiting_tasks: int | None
    """Published and not yet opened; None while the controller does not answer."""
    oldest_wait: Wait | None
    actors: list[ActorView]
    suspect_stamps: int
    """Records whose senders' clocks are not believed."""


def frame(fold: RunFold, book: SessionBook, views: Sequence[ActorView], now_ms: int) -> Frame:
    """The picture at `now_ms`, the reader's own time."""
    activity = book.recent(now_ms - int(WINDOW_S * 1000))
    states = {view.name: view.state for view in views if view.up}
    return Frame(
        time_ms=now_ms,
        version=fold.current,
        in_flight=_in_flight(fold, book),
        window_s=WINDOW_S,
        tool_calls_per_s=activity.calls / WINDOW_S,
        turns_per_s=activity.turns / WINDOW_S,
        sampled_tokens_per_s=activity.sampled_tokens / WINDOW_S,
        open_groups=len(fold.open_groups),
        sealed_groups=fold.sealed,
        discarded=dict(fold.discarded),
        left_out=dict(fold.dropped),
        batches=len(fold.batches),
        steps=len(fold.steps),
        versions=version_rows(fold),
        lags=lags(fold, book),
        staleness=dict(sorted(fold.staleness.items())),
        waiting_tasks=states.get("controller", {}).get("waiting_tasks"),
        oldest_wait=_oldest_wait(views),
        actors=list(views),
        suspect_stamps=len(fold.suspects()),
    )


def rate_of(conduct: Conduct) -> Rate:
    """Its solve rate."""
    low, high = wilson(conduct.solved, conduct.sessions)
    return Rate(conduct.solved, conduct.sessions, low, high)


def version_rows(fold: RunFold) -> list[VersionRow]:
    """Every version that sampled, was evaluated or was published, ascending."""
    evaluated: dict[int, dict[str, Rate]] = {}
    for (version, task_set), conduct in sorted(fold.evaluations.items()):
        evaluated.setdefault(version, {})[task_set or "(no set)"] = rate_of(conduct)
    rows = []
    for version in sorted(fold.by_version.keys() | evaluated.keys() | fold.published.keys()):
        conduct = fold.by_version.get(version, Conduct())
        rows.append(
            VersionRow(
                version=version,
                training=rate_of(conduct),
                reward=conduct.mean_reward,
                reads_before_edit=conduct.read_before_edit_rate,
                parallel_turns=conduct.parallel_rate,
                held_out=evaluated.get(version, {}),
            )
        )
    return rows


def lags(fold: RunFold, book: SessionBook) -> list[Lag]:
    """How far each consumer is behind, from what is on the log."""
    graded = fold.verdicts.keys() | fold.ungraded_sessions
    ungraded = sum(
        1
        for note in book.sessions.values()
        if note.end and note.opened.group_id in fold.open_groups and note.session_id not in graded
    )
    newest = max(fold.published, default=None)
    unserved = 0 if newest is None else newest - (fold.current if fold.current is not None else -1)
    return [
        Lag("reward", ungraded, "ended sessions without a verdict"),
        *(Lag(f"assembler {lane}", fold.unbatched(lane), "sealed groups in no batch yet") for lane in fold.lanes),
        Lag("trainer", fold.untrained, "batches without a step"),
        Lag("controller", unserved, "versions published and not made current"),
        *(Lag(replica, fold.behind(replica), "versions behind the current one") for replica in sorted(fold.replicas)),
    ]


def _in_flight(fold: RunFold, book: SessionBook) -> dict[str, int]:
    counts: dict[str, int] = {"production": 0, "rl": 0, "eval": 0}
    for note in book.unfinished:
        if note.origin == "production" or note.opened.group_id in fold.open_groups:
            counts[note.origin] += 1
    return counts


def _oldest_wait(views: Sequence[ActorView]) -> Wait | None:
    waits = [
        Wait(float(view.state["oldest_wait_s"]), str(view.state.get("oldest_wait_for", "")), view.name)
        for view in views
        if view.up and view.name.startswith("session-") and view.state.get("oldest_wait_for")
    ]
    return max(waits, key=lambda wait: wait.seconds, default=None)
