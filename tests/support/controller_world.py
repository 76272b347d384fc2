"""A controller's whole world in memory: topics as lists, and a history in which everything happens that it decides."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any

import msgspec

from odradek.actors.controller.core import EVAL_LANE, Controller
from odradek.streams import topics
from odradek.streams.envelope import Event, Record, encode, event_id
from odradek.streams.errors import OffsetGap
from odradek.streams.events.batches import BatchAssembled, IncarnationBegun, StepCompleted
from odradek.streams.events.groups import GroupSealed, LaneConfigured, MemberReplaced
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskCancelled, TaskPublished
from odradek.streams.events.weights import VersionPinned, VersionPruned, VersionPublished, VersionRolledBack

LANE = LaneConfigured(
    lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=3, tenants_low={"tasks.v1.other": [0]}
)
TESTS = HiddenTests(module="m", function="f", cases=[HiddenCase(id="1", args=[1], want=2)], fail_to_pass=["1"])
SECRET = "the text of a task"
DEADLINE_S = 30.0
Place = tuple[str, int]


class MemoryLog:
    """What `Past` reads of an `EventLog`. Only `shown` records can be seen; each look at an end shows some more, as a
    log does that others write to meanwhile."""

    def __init__(self) -> None:
        self.records: dict[Place, list[Record]] = {}
        self.order: list[Place] = []
        self.shown: dict[Place, int] = {}
        self._next_shown = 0
        self.first = 0
        self.grows: Callable[[str], int] = lambda _topic: 0
        """How many more are there after a look at a topic's ends."""

    def append(self, topic: str, key: str, body: Any, at_ms: int, partition: int | None = None) -> RecordRef:
        number = topics.declared(topic).partition_of(key) if partition is None else partition
        rows = self.records.setdefault((topic, number), [])
        ref = RecordRef(topic, number, len(rows))
        value, headers = encode(Event.of(body, id=event_id("memory", str(ref)), source="test"))
        rows.append(Record(ref, key.encode(), value, headers, at_ms))
        self.order.append((topic, number))
        return ref

    def show(self, count: int) -> None:
        """That many more."""
        for place in self.order[self._next_shown : self._next_shown + count]:
            self.shown[place] = self.shown.get(place, 0) + 1
        self._next_shown += count

    def show_all(self) -> None:
        self.show(len(self.order))

    async def stable_end(self, topic: str, partition: int) -> int:
        return (await self.stable_ends(topic, [partition]))[partition]

    async def stable_ends(self, topic: str, partitions: Iterable[int] | None = None) -> dict[int, int]:
        numbers = range(topics.declared(topic).partitions) if partitions is None else partitions
        ends = {number: self.shown.get((topic, number), 0) for number in numbers}
        self.show(self.grows(topic))
        return ends

    async def beginning(self, _topic: str, _partition: int) -> int:
        return self.first

    async def offsets_for_time(self, topic: str, when: datetime) -> dict[int, int]:
        stamp = round(when.timestamp() * 1000)
        return {
            number: next(
                (one.ref.offset for one in self.records.get((topic, number), []) if one.timestamp_ms >= stamp),
                self.shown.get((topic, number), 0),
            )
            for number in range(topics.declared(topic).partitions)
        }

    async def read(self, topic: str, partition: int, start: int, end: int) -> AsyncIterator[Record]:
        for record in self.records.get((topic, partition), [])[start:end]:
            yield record

    async def read_ref(self, ref: RecordRef) -> Record:
        rows = self.records.get((ref.topic, ref.partition), [])
        if ref.offset >= len(rows):
            raise OffsetGap.at("no committed record", ref.topic, ref.partition, ref.offset)
        return rows[ref.offset]


@dataclass
class History:
    """A controller that lives through whatever `chance` brings; its decisions, and what others say, are on `log`."""

    chance: random.Random
    log: MemoryLog = field(default_factory=MemoryLog)
    core: Controller = field(default_factory=lambda: Controller(LANE))
    now_ms: int = 1_000_000
    tasks: int = 0
    version: int = 0
    untaken: list[tuple[RecordRef, Any]] = field(default_factory=list)
    """Verdicts that are on the log, and that the controller has not read yet."""

    def __post_init__(self) -> None:
        self._decided([LANE])
        first = VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="")
        self._said("weights.v1", "demo", first)

    def step(self) -> None:
        self.now_ms += self.chance.randrange(1, 1500)
        what = self.chance.choices(
            [self.publish, self.reward, self.tick, self.take, self.cancel, self.batch, self.weights, self.strange],
            [4, 14, 8, 6, 1, 4, 2, 1],
        )
        what[0]()

    def tick(self) -> None:
        free = 12 - sum(len(group.unfinished) for group in self.core.groups.values())
        self._decided(self.core.decide(self.now_ms, free, [0]))
        for change in self.core.decide_weights():
            self.log.append("weights.current.v1", change.policy, change, self.now_ms)
            self.core.on_current(change)

    def _decided(self, decisions: Iterable[Any]) -> None:
        for decision in decisions:
            ref = self.log.append("groups.v1", decision.lane, decision, self.now_ms)
            self.core.apply_group(ref.offset, decision, self.now_ms)

    def _said(self, topic: str, key: str, body: Any) -> None:
        self.log.append(topic, key, body, self.now_ms)
        (self.core.on_batch if topic == "batches.v1" else self.core.on_weights)(body)

    def publish(self) -> None:
        old = self.tasks > 0 and self.chance.random() < 0.15
        name = f"t{self.chance.randrange(self.tasks) if old else self.tasks}"
        self.tasks += not old
        task = TaskPublished(
            task_id=name,
            instruction=f"{SECRET} {name}",
            tests=TESTS,
            attempts=self.chance.choice([2, 2, 3, 1]),
            purpose=self.chance.choice(["rl", "rl", "rl", "eval"]),
            priority=self.chance.randrange(2),
            deadline_seconds=DEADLINE_S,
            policy_version=self.chance.choice([None, None, None, 0, 99]),
        )
        self._task(task)

    def cancel(self) -> None:
        if self.tasks:
            self._task(TaskCancelled(task_id=f"t{self.chance.randrange(self.tasks)}"))

    def _task(self, body: Any) -> None:
        topic = self.chance.choice(["tasks.v1", "tasks.v1", "tasks.v1.other"])
        ref = self.log.append(topic, "k", body, self.now_ms, self.chance.randrange(3))
        self.core.on_task(ref, body)

    def reward(self) -> None:
        members = [(group, one) for group in self.core.groups.values() for one in group.unfinished]
        members += [(one.group, one.session_id) for one in self.core.endings]
        if not members:
            return
        group, session = self.chance.choice(members)
        common = {"session_id": session, "group_id": group.opened.group_id, "grader": "g", "grader_version": "1"}
        common |= {"partition": 0, "first_offset": 0, "last_offset": 1}
        solved = float(self.chance.randrange(2))
        verdict: Any = RewardAssigned(**common, components={"solved": solved}, total=solved, notes=[SECRET])
        if self.chance.random() < 0.2:
            verdict = RewardUngraded(**common, cause=SECRET, retryable=self.chance.random() < 0.7)
        self.untaken.append((self.log.append("rewards.v1", session, verdict, self.now_ms), verdict))

    def take(self) -> None:
        for _ in range(self.chance.randrange(len(self.untaken) + 1)):
            self.core.on_verdict(*self.untaken.pop(0))

    def batch(self) -> None:
        if self.core.assembled > self.core.trained:
            step = StepCompleted(
                lane=LANE.lane, policy="demo", step=self.core.trained + 1, batch_id="b", batch_offset=0,
                manifest_key="k", manifest_sha256="",
            )  # fmt: skip
            self._said("batches.v1", LANE.lane, step)
        elif len(self.core.sealed_after) >= LANE.groups_per_batch:
            batch = BatchAssembled(
                batch_id="b", lane=LANE.lane, policy="demo", ordinal=self.core.assembled, groups=[], dropped=[],
                members=[], layout=[], merkle_root="", assembler_version=1, config_offset=0,
                input_offset=self.core.sealed_after[LANE.groups_per_batch - 1],
            )  # fmt: skip
            self._said("batches.v1", LANE.lane, batch)

    def weights(self) -> None:
        some = self.chance.randrange(self.version + 1)
        restored = self.chance.random() < 0.1
        self.version = some if restored else self.version + 1
        published = VersionPublished(
            policy="demo", version=self.version, manifest_key=f"k{self.now_ms}", manifest_sha256="", restored=restored
        )
        if restored:
            begun = IncarnationBegun(
                lane=LANE.lane, policy="demo", incarnation="i", version=min(some, self.core.assembled), batch_offset=-1,
                manifest_key="k", manifest_sha256="",
            )  # fmt: skip
            self._said("batches.v1", LANE.lane, begun)
        other = [
            published,
            VersionPinned(policy="demo", version=self.chance.choice([None, some])),
            VersionRolledBack(policy="demo", to_version=some),
            VersionPruned(policy="demo", versions=[some]),
        ]
        self._said("weights.v1", "demo", published if restored else self.chance.choice(other))

    def strange(self) -> None:
        """What a stranger, a zombie or another lane says; and the lane's configuration written anew."""
        self._decided([self.chance.choice(
            [
                msgspec.structs.replace(LANE, max_staleness=self.chance.randrange(1, 5)),
                GroupSealed(group_id="nobody's", lane=LANE.lane, reason="complete", members=[]),
                MemberReplaced(group_id="nobody's", lane=EVAL_LANE, lost_session="a", new_session="b", cause=""),
                LaneConfigured(lane="other-0", policy="x", groups_per_batch=1, attempts=1, max_staleness=1),
            ]
        )])  # fmt: skip


def plain(value: Any) -> Any:
    """Everything in an object, whatever it is made of, so that two can be compared. No field has to be named here, so
    that none is forgotten. A dict's order does not count."""
    if isinstance(value, dict):
        return sorted(((plain(key), plain(one)) for key, one in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, str | bytes | int | float | None):
        return value
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, plain({name: getattr(value, name) for name in value.__struct_fields__}))
    if is_dataclass(value):
        return (type(value).__name__, plain({one.name: getattr(value, one.name) for one in fields(value)}))
    return (type(value).__name__, plain(vars(value)))
