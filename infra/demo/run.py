"""The main job, end to end: evaluate, train on rollouts, evaluate again, rebuild every batch from the log.

Owns no state: everything it shows is folded from the log. It publishes tasks like any client, and asks the controller
only how many tasks wait. Each phase says what it waits for and ends, with an error, once nothing moves for long: a busy
machine makes a phase longer, never fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.demo.audit import audited
from odradek.infra.demo.family.sets import EVALUATION_SETS, TaskSet, make_task
from odradek.infra.demo.family.task import DemoTask
from odradek.infra.demo.publish import published
from odradek.infra.errors import InfraError
from odradek.infra.observe.fold import Conduct, RunFold
from odradek.infra.observe.follow import RunFollower, count_session_events
from odradek.infra.stack.stack import shortage
from odradek.streams import topics
from odradek.streams.audit.verify import AuditReport
from odradek.streams.envelope import Event, event_id
from odradek.streams.events.tasks import TaskCancelled, TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import RebuildReport, rebuild_all

log = logging.getLogger(__name__)

FIRST_VERSION_S = 120.0
"""Seconds for version 0 to be published and loaded."""
EVALUATION_S = 240.0
"""Seconds an evaluation may go without one more graded task. A session's own deadline is shorter."""
DRAIN_S = 120.0
"""Seconds the groups under way after the training window may go without one of them ending."""
LOOK_S = 1.0
"""Seconds between looks at the log."""
SAY_S = 10.0
"""Seconds between two lines of progress. Longer leaves a person wondering; shorter buries what matters."""
WAITING_TASKS = 24
"""Published and not yet opened tasks kept ahead of the controller. Too few idles it; too many are cancelled at the
end."""


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of one demo run."""

    seed: int = 0
    train_seconds: float = 480.0
    """Wall-clock seconds of the training window."""
    train_steps: int = 0
    """Steps of this run that end the window before its time; 0 for none. A run of so many steps does not depend on how
    busy the machine is."""
    attempts: int = 8
    new_combinations: int = 120
    unseen_identifiers: int = 40
    unseen_templates: int = 40
    greedy: bool = False
    """Evaluate greedily as well."""

    def size(self, task_set: TaskSet) -> int:
        """Tasks of an evaluation set."""
        return int(getattr(self, task_set))


@dataclass(slots=True)
class DemoOutcome:
    """What a run showed."""

    first: dict[TaskSet, Conduct] = field(default_factory=dict)
    last: dict[TaskSet, Conduct] = field(default_factory=dict)
    greedy_first: dict[TaskSet, Conduct] = field(default_factory=dict)
    greedy_last: dict[TaskSet, Conduct] = field(default_factory=dict)
    final_version: int = 0
    begun_at: int = 0
    """The version that the log already had: of a run before this one on the same data folder. 0: none."""
    rebuild: RebuildReport | None = None
    audit: AuditReport | None = None
    """None where no notary ran."""
    session_events: Counter[str] = field(default_factory=Counter)
    """Records of sessions.v1 by type."""
    fold: RunFold = field(default_factory=RunFold)


Say = Callable[[str], None]
States = Callable[[], Awaitable[dict[str, dict[str, Any]]]]
"""By actor name what it says of itself; actors that do not answer are absent."""


class Demo:
    """One run against a running deployment."""

    def __init__(
        self, deployment: Deployment, settings: DemoSettings, event_log: EventLog, states: States, say: Say
    ) -> None:
        self._deployment = deployment
        self._settings = settings
        self._log = event_log
        self._states = states
        self._say = say
        self._follower = RunFollower(event_log)
        self._tasks = self._training_tasks()
        self._waiting: list[TaskPublished] = []
        self.training_began = asyncio.Event()
        """For observers: the training window is open, or over."""

    async def run(self) -> DemoOutcome:
        """The whole job."""
        outcome = DemoOutcome()
        await self._until(
            lambda fold: bool(fold.loaded),
            FIRST_VERSION_S,
            "version 0 to be served",
            lambda _: "waiting until version 0 is served",
        )
        outcome.begun_at = max(self._follower.fold.published)
        if outcome.begun_at:
            self._say(
                f"the log has a run already: going on from version {outcome.begun_at}, and what was evaluated is not "
                f"evaluated again; for a run from the start name another folder with --data"
            )
        outcome.first = await self._evaluate(0, 1.0)
        if self._settings.greedy:
            outcome.greedy_first = await self._evaluate(0, 0.0)
        await self._train()
        outcome.final_version = max(self._follower.fold.published)
        outcome.last = await self._evaluate(outcome.final_version, 1.0)
        if self._settings.greedy:
            outcome.greedy_last = await self._evaluate(outcome.final_version, 0.0)
        outcome.fold = await self._follower.refresh()
        self._say(f"rebuilding {len(outcome.fold.batches)} batches from the log")
        outcome.rebuild = await rebuild_all(self._log, self._deployment.lane.lane, progress=self._say)
        outcome.session_events = await count_session_events(self._log)
        if self._deployment.audit.enabled:
            self._say("verifying the log against what the notary signed")
            outcome.audit = await audited(self._deployment, self._log)
        return outcome

    async def train(self) -> tuple[RunFold, RebuildReport]:
        """The training window alone, and every batch of the lane rebuilt."""
        await self._train()
        fold = await self._follower.refresh()
        return fold, await rebuild_all(self._log, self._deployment.lane.lane, progress=self._say)

    # -- phases ------------------------------------------------------------------------------------------------

    async def _evaluate(self, version: int, temperature: float) -> dict[TaskSet, Conduct]:
        """Each set once, wholly under `version`. Raises InfraError if it stands still."""
        expected = sum(self._settings.size(s) for s in EVALUATION_SETS)
        how = "sampled" if temperature > 0 else "greedy"
        self._say(f"evaluating version {version}, {how}: {expected} held-out tasks")
        ids: dict[str, TaskSet] = {}
        for task_set in EVALUATION_SETS:
            for task in self._generate(task_set, self._settings.size(task_set)):
                event = published(
                    task, attempts=1, purpose="eval", policy_version=version, temperature=temperature,
                    policy=self._deployment.policy,
                )  # fmt: skip
                ids[event.task_id] = task_set
                await self._publish(event)
        results = await self._evaluated(ids, f"evaluation of version {version}")
        for task_set, conduct in results.items():
            self._say(f"  version {version} {how} {task_set}: {conduct.solved}/{conduct.sessions} solved")
        return results

    async def _evaluated(self, ids: dict[str, TaskSet], what: str) -> dict[TaskSet, Conduct]:
        def finished(fold: RunFold) -> bool:
            ours = {g.group_id for g in fold.groups.values() if g.task_id in ids}
            return len(ours) == len(ids) and not ours & fold.open_groups

        def progress(fold: RunFold) -> str:
            ours = {g.group_id for g in fold.groups.values() if g.task_id in ids}
            return f"{len(ours - fold.open_groups)} of {len(ids)} graded"

        fold = await self._until(finished, EVALUATION_S, what, progress)
        results: dict[TaskSet, Conduct] = {s: Conduct() for s in EVALUATION_SETS}
        for verdict in fold.verdicts.values():
            group = fold.groups.get(verdict.group_id)
            if group is not None and group.task_id in ids:
                results[ids[group.task_id]].add(verdict)
        return results

    def _steps_of(self, fold: RunFold) -> int:
        """The lane's own: a branch is on the log of its parent."""
        return sum(step.lane == self._deployment.lane.lane for step in fold.steps)

    async def _train(self) -> None:
        """Keep tasks waiting for the length of the window, then let what is under way end."""
        steps, before = self._settings.train_steps, self._steps_of(await self._follower.refresh())
        until = f"{steps} steps, at most " if steps else ""
        self._say(f"training for {until}{self._settings.train_seconds:.0f} s on fresh tasks")
        end = time.monotonic() + self._settings.train_seconds
        self.training_began.set()
        last_said = 0.0
        while (now := time.monotonic()) < end:
            fold = await self._follower.refresh()
            if steps and self._steps_of(fold) - before >= steps:
                break
            await self._top_up()
            if now - last_said >= SAY_S:
                last_said = now
                self._say(_line(fold, end - now))
                if short := shortage(Path(self._deployment.data_dir)):
                    self._say(f"  {short}: no sandbox is made until there is room")
            await asyncio.sleep(LOOK_S)
        opened = {group.task_id for group in (await self._follower.refresh()).groups.values()}
        for task in self._waiting:
            if task.task_id not in opened:
                await self._publish(TaskCancelled(task_id=task.task_id, reason="the training window is over"))
        lane = self._deployment.lane.lane

        def under_way(fold: RunFold) -> tuple[int, int]:
            batches = sum(batch.lane == lane for batch in fold.batches.values())
            return sum(fold.groups[g].lane == lane for g in fold.open_groups), batches - self._steps_of(fold)

        def progress(fold: RunFold) -> str:
            groups, batches = under_way(fold)
            return f"letting {groups} groups under way end" + (f", {batches} batches to be trained" if batches else "")

        await self._until(lambda fold: max(under_way(fold)) <= 0, DRAIN_S, "groups under way to end", progress)

    async def _top_up(self) -> None:
        state = (await self._checked_states()).get("controller")
        if state is None:
            return
        for _ in range(max(0, WAITING_TASKS - int(state["waiting_tasks"]))):
            event = published(next(self._tasks), attempts=self._settings.attempts, policy=self._deployment.policy)
            self._waiting.append(event)
            await self._publish(event)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _training_tasks(self) -> Iterator[DemoTask]:
        index = 0
        while True:
            yield make_task("train", self._settings.seed, index)
            index += 1

    def _generate(self, task_set: TaskSet, count: int) -> Iterator[DemoTask]:
        return (make_task(task_set, 1000 + self._settings.seed, index) for index in range(count))

    async def _publish(self, body: TaskPublished | TaskCancelled) -> None:
        kind: Literal["task", "cancel"] = "task" if isinstance(body, TaskPublished) else "cancel"
        event = Event.of(body, id=event_id("demo", kind, body.task_id), source="odradek-demo")
        await self._log.append(topics.TASKS.name, body.task_id, event)

    async def _until(
        self, ready: Callable[[RunFold], bool], seconds: float, what: str, progress: Callable[[RunFold], str]
    ) -> RunFold:
        """Waits until `ready`; raises InfraError when `progress` says the same for `seconds`."""
        last_said = moved = time.monotonic()
        said = ""
        while True:
            fold = await self._follower.refresh()
            if ready(fold):
                return fold
            if progress(fold) != said:
                said, moved = progress(fold), time.monotonic()
            if time.monotonic() - last_said >= SAY_S:
                last_said = time.monotonic()
                self._say(f"  {said}")
            state = (await self._checked_states()).get("controller", {})
            if time.monotonic() > moved + seconds:
                waiting = state.get("oldest_wait_for")
                longest = f"; the longest wait is {state['oldest_wait_s']:.0f} s for {waiting}" if waiting else ""
                raise InfraError(f"waited {seconds:.0f} s for {what} and nothing moved ({said}){longest}")
            await asyncio.sleep(LOOK_S)

    async def _checked_states(self) -> dict[str, dict[str, Any]]:
        """What the actors say; raises InfraError if one of them has stopped for good."""
        states = await self._states()
        for name, state in states.items():
            if state.get("fault"):
                raise InfraError(f"{name} stopped: {state['fault']}")
        return states


def _line(fold: RunFold, left: float) -> str:
    recent = [fold.by_version[v] for v in sorted(fold.by_version)[-3:]]
    sessions = sum(c.sessions for c in recent)
    solved = sum(c.solved for c in recent)
    rate = f"{100 * solved / sessions:.0f} %" if sessions else "-"
    dropped = ", ".join(f"{n} {reason}" for reason, n in fold.dropped.most_common()) or "none"
    return (
        f"  {left:4.0f} s left: version {fold.current}, {len(fold.steps)} steps, "
        f"solve rate {rate} (last {sessions} rollouts), {fold.sealed} groups sealed, dropped: {dropped}"
    )
