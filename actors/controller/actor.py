"""The controller's shell: feeds the pure core from the log, commits what it decides, hands members to their hosts.

For its loop: consumes tasks.v1 and every tenant's tasks.v1.TENANT (those configured and those that the broker has when
it starts), rewards.v1, batches.v1, weights.v1; produces groups.v1 and weights.current.v1, both
in one transaction a tick under one transactional id (a controller that another one has taken over from is fenced and
stands down: it stays up, places nothing, says so in `state`, so that exactly one goes on); waits
for session actors (`STATUS_TIMEOUT_S`), the broker (the log's deadlines); unblocked by whatever arrives or by the tick.

Start-up folds the log, from a snapshot where there is a good one (`past.py`): its own decisions, then what other topics
say since; then it hands over every member without a verdict. Group ids, member ids and hosts are deterministic, so
doing this twice does nothing twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray.exceptions

from odradek.actors.controller.core import EVAL_LANE, Controller, Placement
from odradek.actors.controller.identity import sampling_seed
from odradek.actors.controller.letters import Letters
from odradek.actors.controller.past import PastSnapshots
from odradek.actors.controller.placement import Placer, host_of
from odradek.actors.runtime.deployment import Deployment, actor_handle
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.session.actor import HostStatus
from odradek.actors.session.ports import start_of
from odradek.actors.session.runner import SessionSpec
from odradek.streams import topics
from odradek.streams.admin import existing
from odradek.streams.envelope import Event, Record, event_id
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.groups import GroupEvent, GroupOpened, LaneConfigured
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import CancelRequested, SamplingParams, SessionOpened
from odradek.streams.events.tasks import Budget, TaskPublished
from odradek.streams.events.weights import CurrentWeights
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.transactions import Stage

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Seconds between looks at the world. Too low burns CPU on idle ticks; too high delays seals and placements."""
STATUS_TIMEOUT_S = 10.0
"""Seconds a session actor may take to answer. Past it the host counts as away for this tick."""
NAME = "controller"
CLOSED = "its group was closed"
"""Why a session is cancelled."""


class ControllerActor:
    """Ray actor class: one a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._core = Controller(deployment.lane, deployment.max_sessions)
        self._placer = Placer(deployment.session_actors)
        self._inbox: asyncio.Queue[Record] = asyncio.Queue(maxsize=10_000)
        self._written: set[RecordRef] = set()
        self._statuses: dict[int, HostStatus] = {}
        self._told: set[tuple[str, str]] = set()
        """Session and boot id of its host: told that its group is closed."""
        self._configured: LaneConfigured | None = None
        """The lane's configuration in force when this controller started."""
        self._ready = False
        self._loop = LoopThread(NAME)
        self._loop.main(self._run(), NAME)

    async def state(self) -> dict[str, Any]:
        """What `odradek status` and `watch` show of the controller."""
        return await self._loop.call(self._state())

    async def _state(self) -> dict[str, Any]:
        core = self._core
        return {
            "ready": self._ready and not self._loop.stood_down,
            "fault": self._loop.stood_down,
            "open_groups": core.backlog.open_groups,
            "waiting_tasks": len(core.queue),
            "ending": len(list(core.endings)),
            "tenants": core.shares().sessions,
            "expected_staleness": core.backlog.expected_staleness,
            "keep_rate": core.backlog.keep_rate,
            "assembled": core.assembled,
            "trained": core.trained,
            "active_sessions": sum(len(s.active) for s in self._statuses.values()),
            "oldest_wait_s": max((s.oldest_wait_s for s in self._statuses.values()), default=0.0),
            "oldest_wait_for": max(
                ((s.oldest_wait_s, s.oldest_wait_for) for s in self._statuses.values()), default=(0.0, "")
            )[1],
        }

    # -- start-up ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._log = EventLog(self._deployment.kafka)
        await self._log.start()
        self._letters = Letters(self._log, self._core, NAME)
        self._snapshots = PastSnapshots(self._log, self._deployment)
        lanes = [self._deployment.lane.lane, EVAL_LANE]
        outputs = [(topics.GROUPS.name, topics.GROUPS.partition_of(lane)) for lane in lanes]
        async with Stage(self._log, NAME, [*outputs, (topics.WEIGHTS_CURRENT.name, 0)]) as stage:
            self._stage = stage
            starts = await self._recover()
            if self._configured != self._deployment.lane:
                await self._commit([self._deployment.lane], [])
            self._hosts = [
                actor_handle(f"session-{i}", self._deployment.namespace) for i in range(self._deployment.session_actors)
            ]
            async with asyncio.TaskGroup() as group:
                for topic, start in starts.items():
                    group.create_task(self._follow(topic, start))
                group.create_task(self._work())

    async def _recover(self) -> dict[str, dict[int, int]]:
        """Fold its own past; returns where to follow each input from."""
        past = await self._snapshots.recall(self._core)
        await past.advance(self._log, self._letters.set_aside, int(time.time() * 1000))
        self._snapshots.unsaved = past.folded
        self._configured = past.configured
        return {
            **{name: _starts(name, past.low.get(name, [])) for name in await self._task_topics()},
            **{
                one.name: past.next(one.name) for one in (topics.GROUPS, topics.REWARDS, topics.WEIGHTS, topics.BATCHES)
            },
        }

    async def _task_topics(self) -> list[str]:
        """Of every tenant, the deployment's own first. A tenant's topic that is made later is followed from the next
        start on."""
        configured = {topics.TASKS.for_tenant(tenant) for tenant in self._deployment.tenants}
        there = {name for name in await existing(self._deployment.kafka) if name.startswith(f"{topics.TASKS.name}.")}
        return [topics.TASKS.name, *sorted(configured | there)]

    # -- inputs ------------------------------------------------------------------------------------------------

    async def _follow(self, topic: str, start: Mapping[int, int]) -> None:
        async for record in self._log.tail(topic, start):
            await self._inbox.put(record)

    async def _take(self, record: Record) -> None:
        """One record of any input. What can't be decoded goes to the dead letters and stops nothing."""
        try:
            body = record.event.body
        except UndecodableRecord as error:
            await self._letters.set_aside(record, error)
            return
        match topics.declared(record.ref.topic).name:
            case topics.TASKS.name:
                self._core.on_task(record.ref, body)
            case topics.REWARDS.name:
                if isinstance(body, RewardAssigned | RewardUngraded):
                    self._core.on_verdict(record.ref, body)
            case topics.BATCHES.name:
                self._core.on_batch(body)
            case topics.WEIGHTS.name:
                self._core.on_weights(body)
            case topics.GROUPS.name:
                await self._on_decision(record)

    async def _on_decision(self, record: Record) -> None:
        """A decision that is not this controller's: most likely another one has taken over, which an idle one would
        otherwise not learn before its next commit, and place members meanwhile. A record of a stranger is folded, as
        it will be at the next start."""
        if record.ref in self._written:
            self._written.discard(record.ref)
            return
        if record.event.body.lane not in (self._deployment.lane.lane, EVAL_LANE):
            return  # a lane of others that shares the partition
        log.warning("a decision of somebody else at %s", record.ref)
        await self._stage.check_owner()
        self._core.apply_group(record.ref.offset, record.event.body, record.timestamp_ms)

    # -- the tick ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self._drain()
            await self._letters.take_released()
            await self._ask_hosts()
            await self._decide()
            await self._cancel()
            await self._hand_over()
            self._snapshots.turn()
            self._ready = True

    async def _drain(self) -> None:
        """Take everything that has arrived; wait a tick for the first."""
        try:
            async with asyncio.timeout(TICK_S):  # of the wait only: what is taken in hand is finished
                first = await self._inbox.get()
        except TimeoutError:
            return
        await self._take(first)
        while not self._inbox.empty():
            await self._take(self._inbox.get_nowait())

    async def _ask_hosts(self) -> None:
        async def ask(index: int) -> tuple[int, HostStatus | None]:
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    return index, await self._hosts[index].status.remote()
            except (ray.exceptions.RayError, TimeoutError) as error:
                log.warning("session actor %d does not answer: %s", index, type(error).__name__)
                return index, None

        answers = await asyncio.gather(*(ask(i) for i in range(len(self._hosts))))
        self._statuses = {index: status for index, status in answers if status is not None}

    async def _decide(self) -> None:
        active = sum(len(status.active) for status in self._statuses.values())
        free = self._core.room(self._deployment.max_sessions, active) if self._statuses else 0
        floor = await self._log.stable_ends(topics.SESSIONS.name) if self._core.may_open(free) else {}
        decisions = self._core.decide(int(time.time() * 1000), free, [floor[p] for p in sorted(floor)])
        changes = self._core.decide_weights()
        if decisions or changes:
            await self._commit(decisions, changes)

    async def _commit(self, decisions: list[GroupEvent], changes: list[CurrentWeights]) -> None:
        """All or nothing; folded only once committed."""
        items: list[tuple[str, str, Event[Any]]] = []
        for decision in decisions:
            items.append((topics.GROUPS.name, decision.lane, self._event(decision)))
        for change in changes:
            items.append((topics.WEIGHTS_CURRENT.name, change.policy, self._event(change)))
        async with self._stage.transaction() as transaction:
            refs = await transaction.append_many(items)
            await reach("controller.before_commit")
        await reach("controller.after_commit")
        for ref, decision in zip(refs, decisions, strict=False):
            self._written.add(ref)
            self._core.apply_group(ref.offset, decision, int(time.time() * 1000))
        self._snapshots.unsaved += len(decisions)
        for change in changes:
            self._core.on_current(change)

    @staticmethod
    def _event(body: Any) -> Event[Any]:
        """Its id is that of the decision: the same decision made again has the same id."""
        digest = hashlib.sha256(msgspec.msgpack.encode(body)).hexdigest()
        return Event.of(body, id=event_id(NAME, digest), source=NAME)

    # -- placement ---------------------------------------------------------------------------------------------

    async def _hand_over(self) -> None:
        placements = {p.session_id: p for p in self._core.placements()}
        self._placer.forget(placements)
        boots = {i: s.boot_id for i, s in self._statuses.items()}
        active = {i: frozenset(s.active) for i, s in self._statuses.items()}
        now = time.monotonic()
        by_host: dict[int, list[SessionSpec]] = {}
        for session in self._placer.due(placements, boots, active, now):
            spec = await self._spec(placements[session])
            by_host.setdefault(host_of(session, len(self._hosts)), []).append(spec)
        for host, specs in by_host.items():
            try:
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await self._hosts[host].open.remote(specs)
            except (ray.exceptions.RayError, TimeoutError) as error:
                log.warning("session actor %d took no sessions: %s", host, type(error).__name__)
                continue
            for spec in specs:
                self._core.placed(spec.session_id)
                self._placer.handed_over(spec.session_id, boots[host], now)
                if spec.cancelled:
                    self._told.add((spec.session_id, boots[host]))

    async def _spec(self, placement: Placement) -> SessionSpec:
        opened = placement.group.opened
        task = await self._task(opened)
        session = placement.session_id
        floor = None
        if not placement.fresh:
            number = topics.SESSIONS.partition_of(session)
            floor = opened.sessions_floor[number] if opened.sessions_floor else 0
        return SessionSpec(
            opened=SessionOpened(
                session_id=session,
                policy=opened.policy,
                group_id=opened.group_id,
                lane=opened.lane,
                task=opened.task,
                attempt=placement.attempt,
                image=task.image,
                files_ref=task.files_ref,
                setup=task.setup,
                tokenizer=self._deployment.tokenizer,
                sampling=SamplingParams(temperature=_temperature(task), seed=sampling_seed(session)),
                pinned_version=opened.pinned_version,
                budget=within(opened.budget, self._deployment.max_context),
                condense=self._deployment.condense,
            ),
            message=task.instruction,
            start=start_of(task),
            origin="eval" if opened.purpose == "eval" else "rl",
            tenant=topics.tenant_of(opened.task.topic) or "default",
            correlation=opened.group_id,
            history_floor=floor,
            cancelled=CLOSED if placement.closed else "",
        )

    async def _task(self, opened: GroupOpened) -> TaskPublished:
        task = self._core.tasks.get(opened.group_id)
        if task is None:
            body = (await self._log.read_ref(opened.task)).event.body
            assert isinstance(body, TaskPublished)
            task = body
            if opened.group_id in self._core.groups:
                self._core.tasks[opened.group_id] = task
        return task

    async def _cancel(self) -> None:
        """Members of closed groups that run somewhere: their work is no longer wanted. Each host is told once; one that
        was not reached is told in the next turn, and one that restarts is handed them to be ended."""
        for index, status in self._statuses.items():
            for session in status.active:
                if session not in self._core.endings or (session, status.boot_id) in self._told:
                    continue
                cancel = CancelRequested(request_id=f"closed:{session}", reason=CLOSED)
                try:
                    async with asyncio.timeout(STATUS_TIMEOUT_S):
                        await self._hosts[index].post.remote(session, cancel)
                    self._told.add((session, status.boot_id))
                except (ray.exceptions.RayError, TimeoutError) as error:
                    log.warning("session %s was not told that its group is closed: %s", session, error)
        self._told = {told for told in self._told if told[0] in self._core.endings}


def within(budget: Budget, context: int) -> Budget:
    """A task may ask for more context than the policy has; then the session gets, and records, what there is."""
    return msgspec.structs.replace(budget, max_context_tokens=min(budget.max_context_tokens, context))


def _starts(topic: str, low: Sequence[int]) -> dict[int, int]:
    """By partition where to read a task topic from."""
    return {number: low[number] if number < len(low) else 0 for number in range(topics.declared(topic).partitions)}


def _temperature(task: TaskPublished) -> float:
    """RL samples the policy's own distribution, whatever the task says."""
    return task.temperature if task.purpose == "eval" else 1.0
