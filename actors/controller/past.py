"""What a controller starts from: the fold of its own decisions and of what the log says of batches, weights and
verdicts, from a snapshot and what came after it, or from the beginning.

The state after some records is the same wherever the fold began (test_controller_snapshot_properties.py): `advance`
takes the end of batches before that of groups, so that no batch is of a group that is not folded yet. A snapshot holds
ids, offsets, counters and the openings of open groups (`State`). No task's text is in it: tasks are read by their
reference. No verdict is: those of open groups are read again from the oldest one's opening on.

A snapshot is a cache (`streams.snapshots`): of another log, another release or other settings it is dropped with a
warning (test_controller_snapshot.py). It is made like a start: from the one before and the log, beside the live core,
which knows what no snapshot may hold. So it is the same whoever makes it, a fenced controller included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

import msgspec

from odradek.actors.controller.admission import Backlog
from odradek.actors.controller.core import EVAL_LANE, Controller, PolicyWeights
from odradek.actors.controller.endings import Unended
from odradek.actors.controller.groups import GroupState
from odradek.actors.controller.intake import Decided
from odradek.actors.runtime.deployment import Deployment
from odradek.streams import admin, topics
from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord, UnknownEventType
from odradek.streams.events.groups import GroupOpened, LaneConfigured
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.log import EventLog
from odradek.streams.sealing import GroupRule
from odradek.streams.snapshots import Mark, Snapshots, code_hash, drop, unlike

log = logging.getLogger(__name__)

SAVE_EVERY = 2_000
"""Records folded or decided between two snapshots. Too few: it writes all day. Too many: the next start folds that
many more (some ten thousand a second)."""
BREATH = 200
"""Records folded before others get a turn: a snapshot in the making must not hold up the tick. Too few: overhead."""

Place = tuple[str, int]
Aside = Callable[[Record, UndecodableRecord], Awaitable[None]]
"""What is done with a record that can't be read."""


class State(msgspec.Struct, frozen=True):
    """All of a `Past`, as a snapshot holds it."""

    configured: LaneConfigured | None
    low: dict[str, list[int]]
    opened_ms: dict[str, int]
    groups: list[GroupState]
    unended: list[Unended]
    rule: GroupRule
    backlog: Backlog
    weights: dict[str, PolicyWeights]
    decided: Decided
    served: dict[str, int]
    sealed_after: list[int]
    opened_count: int
    assembled: int
    trained: int


@dataclass(slots=True)
class Past:
    """See the module. The core is the caller's to go on with, once it is folded."""

    core: Controller
    low: dict[str, list[int]]
    """By task topic and partition: tasks before this offset are decided."""
    configured: LaneConfigured | None = None
    """The lane's configuration in force."""
    opened_ms: dict[str, int] = field(default_factory=dict)
    """When a group was opened whose verdicts have to be read from there: one that was open when verdicts were read
    last, or was opened since."""
    marks: dict[Place, Mark] = field(default_factory=dict)
    folded: int = 0
    """Decisions folded by `advance`."""

    @classmethod
    def of_nothing(cls, core: Controller) -> Past:
        """Before the first decision."""
        low = {topics.TASKS.name: core.lane.tasks_low} | core.lane.tenants_low
        return cls(core, {name: list(offsets) for name, offsets in low.items()})

    def next(self, topic: str) -> dict[int, int]:
        """By partition the first offset that is not folded."""
        return {mark.partition: mark.next for mark in self.marks.values() if mark.topic == topic}

    # -- from the log ------------------------------------------------------------------------------------------

    async def advance(self, event_log: EventLog, aside: Aside, now_ms: int) -> None:
        """Fold everything that is on the log now."""
        lanes = [self.core.lane.lane, EVAL_LANE]
        batches = topics.BATCHES.partition_of(lanes[0])
        batches_end = await event_log.stable_end(topics.BATCHES.name, batches)
        weights_end = await event_log.stable_end(topics.WEIGHTS.name, 0)
        decided = await event_log.stable_ends(topics.GROUPS.name, [topics.GROUPS.partition_of(one) for one in lanes])
        verdicts = await event_log.stable_ends(topics.REWARDS.name)
        for number, end in decided.items():
            async for record in self._new(event_log, aside, topics.GROUPS.name, number, end):
                self._decision(record)
        async for record in self._new(event_log, aside, topics.BATCHES.name, batches, batches_end):
            self.core.on_batch(record.event.body)
        async for record in self._new(event_log, aside, topics.WEIGHTS.name, 0, weights_end):
            self.core.on_weights(record.event.body)
        await self._served_last(event_log, aside)
        self.core.endings.forget(now_ms)
        await self._verdicts(event_log, aside, verdicts)
        self.core.recovered()

    def _decision(self, record: Record) -> None:
        body = record.event.body
        self.core.apply_group(record.ref.offset, body, record.timestamp_ms)
        self.folded += 1
        if isinstance(body, LaneConfigured) and body.lane == self.core.lane.lane:
            self.configured = body
        elif isinstance(body, GroupOpened) and body.policy == self.core.lane.policy:
            self.opened_ms[body.group_id] = record.timestamp_ms
            for name, offsets in [(topics.TASKS.name, body.tasks_low), *body.tenants_low.items()]:
                known = self.low.get(name, [])
                self.low[name] = [max(pair) for pair in zip_longest(known, offsets, fillvalue=0)]

    async def _served_last(self, event_log: EventLog, aside: Aside) -> None:
        """weights.current.v1 is compacted, so short: always read whole."""
        topic = topics.WEIGHTS_CURRENT.name
        start = await event_log.beginning(topic, 0)
        async for record in _readable(event_log, aside, topic, 0, start, await event_log.stable_end(topic, 0)):
            self.core.on_current(record.event.body)

    async def _verdicts(self, event_log: EventLog, aside: Aside, ends: dict[int, int]) -> None:
        """No verdict that matters lies before the oldest opening of a group that waits for one, nor, of a session that
        is only to end and was so when verdicts were read last, before where they were read up to."""
        topic = topics.REWARDS.name
        waiting = {*self.core.groups, *(one.group.opened.group_id for one in self.core.endings)}
        since = min((self.opened_ms[group] for group in waiting if group in self.opened_ms), default=None)
        starts = self.next(topic) or ends
        if since is not None:
            opened = await event_log.offsets_for_time(topic, datetime.fromtimestamp(since / 1000, UTC))
            starts = {number: min(opened[number], self.next(topic).get(number, opened[number])) for number in opened}
        for number, end in ends.items():
            async for record in self._new(event_log, aside, topic, number, end, starts[number]):
                if isinstance(record.event.body, RewardAssigned | RewardUngraded):
                    self.core.on_verdict(record.ref, record.event.body)
        self.opened_ms = {group: at for group, at in self.opened_ms.items() if group in self.core.groups}

    async def _new(
        self, event_log: EventLog, aside: Aside, topic: str, number: int, end: int, start: int | None = None
    ) -> AsyncIterator[Record]:
        """What is not folded yet, or from `start` on; marked once all of it was taken."""
        mark = self.marks.get((topic, number))
        if mark is None:
            first = await event_log.beginning(topic, number)
            mark = Mark(topic, number, first, first)
        last = None
        async for record in _readable(event_log, aside, topic, number, mark.next if start is None else start, end):
            last = record
            yield record
        self.marks[topic, number] = mark.after(last, end)

    # -- snapshots ---------------------------------------------------------------------------------------------

    def export(self) -> bytes:
        """As a snapshot holds it."""
        core = self.core
        state = State(
            configured=self.configured,
            low=self.low,
            opened_ms=self.opened_ms,
            groups=[replace(group, verdicts={}) for group in core.groups.values()],
            unended=[replace(one, group=replace(one.group, verdicts={})) for one in core.endings],
            rule=core.rule,
            backlog=core.backlog,
            weights=core.weights,
            decided=core.intake.decided,
            served=core.served,
            sealed_after=core.sealed_after,
            opened_count=core.opened_count,
            assembled=core.assembled,
            trained=core.trained,
        )
        return msgspec.msgpack.encode(state)

    def restore(self, state: State, marks: list[Mark]) -> None:
        """Take up what another one exported; nothing has been folded here yet."""
        core = self.core
        self.configured, self.low, self.opened_ms = state.configured, state.low, state.opened_ms
        self.marks = {(mark.topic, mark.partition): mark for mark in marks}
        core.groups = {group.opened.group_id: group for group in state.groups}
        core.endings.unended = {one.session_id: one for one in state.unended}
        core.rule, core.backlog, core.weights = state.rule, state.backlog, state.weights
        core.intake.decided = state.decided
        core.served, core.sealed_after = state.served, state.sealed_after
        core.opened_count, core.assembled, core.trained = state.opened_count, state.assembled, state.trained


class PastSnapshots:
    """The snapshots of a deployment's controller, in its data folder; without a folder there are none."""

    def __init__(self, event_log: EventLog, deployment: Deployment) -> None:
        self._log = event_log
        self._deployment = deployment
        self._snapshots: Snapshots | None = None
        self._making: asyncio.Task[None] | None = None
        self.unsaved = 0
        """Decisions since the last snapshot."""

    async def recall(self, core: Controller) -> Past:
        """The past as far as a snapshot has it; nothing where none can be taken."""
        past = Past.of_nothing(core)
        snapshots = await self._of_this_log()
        for path, snapshot in await asyncio.to_thread(snapshots.load) if snapshots is not None else []:
            reason = await unlike(self._log, snapshot.marks)
            try:
                state = await asyncio.to_thread(msgspec.msgpack.decode, snapshot.state, type=State)
            except msgspec.MsgspecError as error:
                reason = reason or f"it can't be loaded: {error}"
            if reason:
                drop(path, reason)
                continue
            past.restore(state, snapshot.marks)
            break
        return past

    async def _of_this_log(self) -> Snapshots | None:
        if self._snapshots is None and self._deployment.data_dir:
            one = self._deployment
            code = await asyncio.to_thread(code_hash, __name__)
            cluster = await admin.cluster_id(one.kafka)
            settings = msgspec.json.encode(
                (one.kafka.prefix, one.lane, one.policy, one.max_sessions, one.incarnation), order="sorted"
            )
            self._snapshots = Snapshots(Path(one.data_dir) / "controller", f"{code} {cluster} {settings.decode()}")
        return self._snapshots

    def turn(self) -> None:
        """Once a tick: begins to make a snapshot if enough was decided since the last one. Nothing waits for it."""
        if self._deployment.data_dir and self.unsaved >= SAVE_EVERY and (self._making is None or self._making.done()):
            self.unsaved = 0
            self._making = asyncio.create_task(self._make())

    async def _make(self) -> None:
        try:
            past = await self.recall(Controller(self._deployment.lane, self._deployment.max_sessions))
            await past.advance(self._log, _passed_over, int(time.time() * 1000))
            if self._snapshots is not None and past.folded:
                await self._snapshots.save(past.marks.values(), await asyncio.to_thread(past.export))
        except Exception as error:  # whatever it is, nothing but the next start's speed depends on it
            log.warning("no snapshot was made: %s: %s", type(error).__name__, error)


async def _passed_over(_record: Record, error: UndecodableRecord) -> None:
    """Whoever folds it for real has set it aside."""
    if isinstance(error, UnknownEventType):
        raise error


async def _readable(
    event_log: EventLog, aside: Aside, topic: str, number: int, start: int, end: int
) -> AsyncIterator[Record]:
    """The records of [start, end). One that can't be read is nobody's decision: it is set aside."""
    count = 0
    async for record in event_log.read(topic, number, start, end):
        if (count := count + 1) % BREATH == 0:
            await asyncio.sleep(0)
        try:
            _ = record.event
        except UndecodableRecord as error:
            await aside(record, error)
            continue
        yield record
