"""A small run as the real writers would have logged it, made by hand: for whatever reads a log.

`RunLog` is a log in memory that hands out the offsets a fresh broker would; `small_run` fills one (groups, sessions
with real tokens, rewards, batches by the real assembly, steps, versions, evaluations); `write` puts it on a broker.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from odradek.actors.policy.template import Call, XmlTemplate
from odradek.streams import topics
from odradek.streams.assembly.v1.batch import Positions, build
from odradek.streams.assembly.v1.select import GroupRecords, choose
from odradek.streams.assembly.v1.sequence import sequence_of
from odradek.streams.codec import f32, i32
from odradek.streams.envelope import Event, Record, encode, event_id
from odradek.streams.events.batches import StepCompleted
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import NO_SEQUENCE, Meta, Origin, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    EnvironmentClosed,
    EnvironmentOpened,
    FileChange,
    MessageReceived,
    SessionCompleted,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
    WeightSpan,
    WorkspaceDelta,
)
from odradek.streams.events.weights import CurrentWeights, ReplicaReported, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord
from support.session_world import template

LANE = LaneConfigured(lane="main-0", policy="demo", groups_per_batch=3, attempts=4, max_staleness=2)
EVAL = "eval-1"
START_MS = 1_790_000_000_000


@dataclass
class RunLog:
    """A log in memory; time is the writer's `now_ms`."""

    now_ms: int = START_MS
    records: list[Record] = field(default_factory=list)
    events: list[tuple[str, str, Event[Any]]] = field(default_factory=list)
    ends: Counter[tuple[str, int]] = field(default_factory=Counter)

    def append(self, topic: str, key: str, body: Any, *, meta: Meta | None = None, id: str = "") -> RecordRef:
        partition = topics.declared(topic).partition_of(key)
        ref = RecordRef(topic, partition, self.ends[topic, partition])
        self.ends[topic, partition] += 1
        event = Event.of(body, id=id or event_id("test", str(ref)), source="test", meta=meta)
        value, headers = encode(event)
        self.records.append(Record(ref, key.encode(), value, headers, self.now_ms))
        self.events.append((topic, key, event))
        return ref

    def next_ref(self, topic: str, key: str) -> int:
        return self.ends[topic, topics.declared(topic).partition_of(key)]

    def of(self, *names: str) -> list[Record]:
        return [record for record in self.records if record.ref.topic in names]

    async def write(self, event_log: EventLog) -> None:
        """To a fresh deployment, in the same order, so that offsets are the same."""
        for topic, key, event in self.events:
            await event_log.append(topic, key, event)


@dataclass
class SessionWriter:
    """Writes one session's records as its owner would."""

    log: RunLog
    session_id: str
    origin: Origin
    opened: SessionOpened
    text: XmlTemplate
    records: list[SessionRecord] = field(default_factory=list)
    epoch: int = NO_SEQUENCE
    seq: int = 0
    position: int = 0

    def open(self, message: str) -> None:
        self.epoch = self._put(self.opened, owner=False).offset
        self._put(MessageReceived(message_id="0", text=message), owner=False)

    def _put(self, body: Any, *, owner: bool = True) -> RecordRef:
        at = {"seq": self.seq, "epoch": self.epoch} if owner else {}
        self.seq += owner
        meta = Meta(origin=self.origin, correlation=self.opened.group_id, time_ms=self.log.now_ms, **at)
        identifier = event_id("session", self.session_id, len(self.records))
        ref = self.log.append("sessions.v1", self.session_id, body, meta=meta, id=identifier)
        self.records.append((ref.offset, identifier, meta, body))
        return ref

    def turn(self, number: int, prompt: list[int], calls: list[Call], version: int, *, done: bool = False) -> None:
        completion = self.text.turn(calls, done=done)
        self.log.now_ms += 400
        self._put(
            TurnSampled(
                turn=number,
                position=self.position,
                prompt=i32(prompt),
                completion=i32(completion),
                logprobs=f32([-0.5] * len(completion)),
                spans=[WeightSpan(0, version)],
                numerics_id="test",
                finish_reason="stop",
                messages=["0"] if number == 0 else [],
                queue_ms=20.0,
                prefill_ms=60.0,
                decode_ms=300.0,
            )
        )
        self.position += len(prompt) + len(completion)

    def calls(self, turn: int, calls: list[Call], results: list[str], *, edited: str = "") -> None:
        for index, call in enumerate(calls):
            effect: Any = "workspace" if edited else "pure"
            self._put(
                ToolRequested(
                    call_id=f"{turn}.{index}", turn=turn, index=index, name=call.name, arguments=call.arguments,
                    effect=effect,
                )
            )  # fmt: skip
        if turn == 0:
            self._put(EnvironmentOpened(sandbox_id=f"box-{self.session_id}", driver="ns", image_digest="sha256:0"))
        self.log.now_ms += 50
        for index, text in enumerate(results):
            change = FileChange(path="shop/total.py", kind="file", content=edited.encode())
            delta = WorkspaceDelta(changes=[change]) if edited else None
            self._put(
                ToolCompleted(
                    call_id=f"{turn}.{index}", turn=turn, index=index, text=text, is_error=text.startswith("error"),
                    delta=delta, duration_ms=12.5,
                )
            )  # fmt: skip

    def complete(self, usage: Usage, first_offset: int) -> RecordRef:
        end = SessionCompleted(reason="done", first_offset=first_offset, usage=usage, group_id=self.opened.group_id)
        ref = self._put(end)
        self._put(EnvironmentClosed(sandbox_id=f"box-{self.session_id}"))
        return ref


@dataclass
class Run:
    """Writes a run, group by group."""

    seed: int = 0
    log: RunLog = field(default_factory=RunLog)
    text: XmlTemplate = field(default_factory=template)
    groups: int = 0
    version: int = 0
    kept: list[GroupRecords] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def publish(self, version: int, batch_id: str = "") -> None:
        self.log.append("weights.v1", "demo", VersionPublished(
            policy="demo", version=version, manifest_key=f"0/demo/main-0/{version}", manifest_sha256="0" * 64,
            lane=LANE.lane, batch_id=batch_id,
        ))  # fmt: skip
        self.log.append("weights.current.v1", "demo", CurrentWeights(
            policy="demo", version=version, manifest_key=f"0/demo/main-0/{version}", manifest_sha256="0" * 64,
        ))  # fmt: skip
        self.log.now_ms += 300
        self.log.append("replicas.v1", "inference-0", ReplicaReported(
            replica="inference-0", policy="demo", version=version, healthy=True, load_ms=210.0,
        ))  # fmt: skip
        self.version = version

    def open_group(self, *, attempts: int, purpose: Any = "rl", labels: Any = None, suffix: str = "") -> GroupOpened:
        name = f"group-{self.groups:03d}"
        self.groups += 1
        lane = LANE.lane if purpose == "rl" else EVAL
        opened = GroupOpened(
            group_id=name, lane=lane, ordinal=self.groups, task=RecordRef("tasks.v1", 0, self.groups),
            task_id=f"task-{self.groups}{suffix}", task_digest="0", purpose=purpose, policy="demo",
            sessions=[f"{name}-s{i}" for i in range(attempts)], version=self.version,
            pinned_version=self.version if purpose == "eval" else None, deadline_ms=self.log.now_ms + 900_000,
            labels=labels or {},
        )  # fmt: skip
        self.log.append("groups.v1", lane, opened)
        return opened

    def session(self, group: GroupOpened, attempt: int, skill: float) -> tuple[SealedMember, RewardAssigned, Any]:
        """One attempt, from its opening to its verdict; solved with probability `skill`."""
        name, origin = group.sessions[attempt], "rl" if group.purpose == "rl" else "eval"
        writer = SessionWriter(
            self.log, name, origin, SessionOpened(  # type: ignore[arg-type]
                session_id=name, policy="demo", group_id=group.group_id, lane=group.lane, task=group.task,
                attempt=attempt, pinned_version=group.pinned_version,
            ), self.text,
        )  # fmt: skip
        first = self.log.next_ref("sessions.v1", name)
        writer.open("fix test_total")
        parallel = self.random.random() < skill
        look = [Call("grep", {"pattern": "def total"}), Call("read_file", {"path": "shop/total.py"})]
        look = look if parallel else look[1:]
        found = ["shop/total.py:3:def total(xs):", "1 def total(xs):\n2     return max(xs)"][-len(look) :]
        writer.turn(0, self.text.open("fix test_total"), look, self.version)
        writer.calls(0, look, found)
        edit = [Call("edit_file", {"path": "shop/total.py", "old": "max", "new": "sum"})]
        writer.turn(1, self.text.results(found), edit, self.version)
        writer.calls(1, edit, ["edited shop/total.py"], edited="def total(xs):\n    return sum(xs)\n")
        writer.turn(2, self.text.results(["edited shop/total.py"]), [], self.version, done=True)
        usage = Usage(
            turns=3,
            calls=len(look) + 1,
            parallel_turns=int(parallel),
            sampled_tokens=30,
            context_tokens=writer.position,
        )
        ref = writer.complete(usage, first)
        solved = float(self.random.random() < skill)
        self.log.now_ms += 150
        reward = RewardAssigned(
            session_id=name, group_id=group.group_id, partition=ref.partition, first_offset=first,
            last_offset=ref.offset, grader="hidden_tests", grader_version="1",
            components={"solved": solved, "turns": -0.03}, total=solved - 0.03,
            sampled_tokens=30 + self.random.randrange(40), oldest_version=self.version, newest_version=self.version,
            reads_before_edit=self.random.random() < 0.5 + skill / 2, parallel_turns=int(parallel), turns=3,
            grading_ms=90.0,
        )  # fmt: skip
        at = self.log.append("rewards.v1", name, reward, meta=Meta(origin=origin))  # type: ignore[arg-type]
        member = SealedMember(
            session_id=name, status="rewarded", partition=ref.partition, first_offset=first, last_offset=ref.offset,
            reward=at,
        )  # fmt: skip
        return member, reward, sequence_of(name, writer.records)

    def group(
        self, skill: float, *, attempts: int = 4, purpose: Any = "rl", labels: Any = None, suffix: str = ""
    ) -> None:
        """A group from opening to seal."""
        opened = self.open_group(attempts=attempts, purpose=purpose, labels=labels, suffix=suffix)
        done = [self.session(opened, attempt, skill) for attempt in range(attempts)]
        sealed = GroupSealed(
            group_id=opened.group_id, lane=opened.lane, reason="complete", members=[member for member, _, _ in done]
        )
        ref = self.log.append("groups.v1", opened.lane, sealed)
        if purpose == "rl":
            self.kept.append(GroupRecords(
                offset=ref.offset, sealed=sealed, rewards={r.session_id: r for _, r, _ in done},
                sequences={r.session_id: s for _, r, s in done},
            ))  # fmt: skip

    def discard(self) -> None:
        """A group lost to our own faults, with one member that had finished."""
        opened = self.open_group(attempts=4)
        self.log.append("groups.v1", opened.lane, GroupDiscarded(
            group_id=opened.group_id, lane=opened.lane, reason="infrastructure", member_tokens=[44],
        ))  # fmt: skip

    def train(self) -> None:
        """Assemble what has been sealed, step, publish."""
        chosen = choose(self.kept, LANE, lambda _subject: True)
        last = self.log.next_ref("groups.v1", LANE.lane) - 1
        positions = Positions(config_offset=0, input_offset=last, subjects_offset=0, weights_offset=0)
        batch = build(chosen.kept, chosen.dropped, LANE, self.version, positions)
        self.kept = []
        ref = self.log.append("batches.v1", LANE.lane, batch, id=batch.batch_id)
        self.log.now_ms += 2_500
        step = StepCompleted(
            lane=LANE.lane, policy="demo", step=self.version + 1, batch_id=batch.batch_id, batch_offset=ref.offset,
            manifest_key=f"0/demo/main-0/{self.version + 1}", manifest_sha256="0" * 64,
            metrics={"entropy": 0.9 - 0.05 * self.version, "gradient_norm": 0.4, "trained_tokens": 900.0},
        )  # fmt: skip
        self.log.append("batches.v1", LANE.lane, step)
        self.publish(self.version + 1, batch.batch_id)

    def evaluate(self, skill: float, count: int) -> None:
        for task_set in ("new_combinations", "unseen_identifiers", "unseen_templates"):
            for _ in range(count):
                self.group(skill, attempts=1, purpose="eval", labels={"set": task_set})


def small_run(*, versions: int = 3, groups: int = 4, evaluations: int = 4, seed: int = 0) -> RunLog:
    """Evaluate, train `versions` steps with rising skill, evaluate again; one group is lost on the way."""
    run = Run(seed)
    run.log.append("groups.v1", LANE.lane, LANE)
    run.publish(0)
    run.evaluate(0.3, evaluations)
    for step in range(versions):
        for _ in range(groups):
            run.group(0.3 + 0.4 * step / max(1, versions - 1))
        if step == 0:
            run.discard()
        run.train()
    run.evaluate(0.8, evaluations)
    return run.log
