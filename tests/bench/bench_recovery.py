"""Seconds from a restart to the last open session being somebody's again, on a log that holds many finished ones.

`python tests/bench/bench_recovery.py [--sessions 50000] [--open 104] [--bootstrap HOST:PORT] [--json]`; without an
address it starts a broker of its own. The log is made up, at the demo's shape: groups of 8, 15 records a session, a
batch every 8 groups; the last `--open` sessions are in the middle of a turn. Measured, each in a fresh process state:
- `session_host_s`: a restarted session actor is handed its sessions; until all are taken over (session.resumed);
- `whole_topic_s`: what reading sessions.v1 from its beginning costs, for comparison: nobody does it on a restart;
- `controller_cold_s`: a controller without a snapshot, until it has handed over every open member, and what of it went
  where (`open` the broker, `recall` a snapshot, `advance`: fold what came after it, `hand_over`);
- `controller_s`: the same from a snapshot, several times; `snapshot_made_s`: beside its work, what making one takes;
- `assembler_s`: a restarted assembler, until it reads on where its last batch ended (it folds groups.v1 for that).
Ray's own restart of a process (imports: seconds) is not in these numbers. Quote them from a quiet machine only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from odradek.actors.controller import actor as controller_module
from odradek.actors.controller import past as past_module
from odradek.actors.controller.actor import ControllerActor
from odradek.actors.controller.identity import group_id, session_id
from odradek.actors.controller.past import Past, PastSnapshots
from odradek.actors.policy.template import Call, XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.actor import HostStatus
from odradek.actors.session.clients import KafkaJournal
from odradek.actors.session.owned import OwnedSession
from odradek.actors.session.ports import WorkspaceStart
from odradek.actors.session.runner import SessionSpec
from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.testing import running, scratch
from odradek.streams import admin, topics
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.codec import f32, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Event, encode, event_id
from odradek.streams.events.batches import BatchAssembled, BatchMember, StepCompleted
from odradek.streams.events.groups import GroupOpened, GroupSealed, LaneConfigured, SealedMember
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionOpened,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
    WeightSpan,
)
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.transactions import Stage

ATTEMPTS = 8
GROUPS_PER_BATCH = 8
TURNS = 4
LANE = LaneConfigured(
    lane="main-0", policy="demo", groups_per_batch=GROUPS_PER_BATCH, attempts=ATTEMPTS, max_staleness=2
)
TOKENIZER = Path(__file__).parents[2] / "infra" / "demo" / "warmstart" / "assets" / "tokenizer.json"
TEMPLATE = XmlTemplate(Tokenizer.from_file(TOKENIZER))
REPEATED = 3
"""Restarts of each kind: the first one in a process also loads what later ones find loaded."""
SESSIONS, GROUPS = topics.SESSIONS.name, topics.GROUPS.name


# -- a log that is made up --------------------------------------------------------------------------------------------


class Writer:
    """Writes fast, and knows the offsets without asking: nobody else writes."""

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._producer = Producer({
            "bootstrap.servers": config.bootstrap, "linger.ms": 20, "compression.type": "zstd",
            "queue.buffering.max.messages": 200_000, "enable.idempotence": True,
        })  # fmt: skip
        self.ends: dict[tuple[str, int], int] = {}

    def put(self, topic: str, key: str, body: Any, meta: Meta | None = None, identifier: str = "") -> RecordRef:
        identifier = identifier or event_id("bench", topic, key)
        return self.put_encoded(topic, key, encode(Event.of(body, id=identifier, source="bench", meta=meta)))

    def put_encoded(self, topic: str, key: str, encoded: tuple[bytes, Any]) -> RecordRef:
        row = topics.declared(topic)
        partition = 0 if row.open else row.partition_of(key)
        value, headers = encoded
        while True:
            try:
                self._producer.produce(
                    self._config.name(topic), value=value, key=key.encode(), partition=partition, headers=list(headers)
                )
                break
            except BufferError:
                self._producer.poll(0.1)
        at = self.ends.get((topic, partition), 0)
        self.ends[topic, partition] = at + 1
        return RecordRef(topic, partition, at)

    def flush(self) -> None:
        assert self._producer.flush(120) == 0, "the broker did not take everything"


def bodies(group: str) -> Iterator[SessionEvent]:
    """A finished session of the demo's size, after its opening."""
    yield MessageReceived(message_id="0", text="fix test_total in a.py")
    call = TEMPLATE.turn([Call("read_file", {"path": "a.py"})])
    for turn in range(TURNS):
        prompt = TEMPLATE.open("fix test_total in a.py") if turn == 0 else TEMPLATE.results(["x = 1\n" * 8])
        yield TurnSampled(
            turn=turn, position=turn * 60, prompt=i32(prompt), completion=i32(call),
            logprobs=f32([-0.5] * len(call)), spans=[WeightSpan(0, 0)], numerics_id="bench", finish_reason="stop",
            messages=["0"] if turn == 0 else [],
        )  # fmt: skip
        if turn == 0:
            yield EnvironmentOpened(sandbox_id="s", driver="bench", image_digest="d")
        if turn < TURNS - 1:
            where = {"call_id": f"{turn}.0", "turn": turn, "index": 0}
            yield ToolRequested(**where, name="read_file", arguments={"path": "a.py"}, effect="pure")
            yield ToolCompleted(**where, text="x = 1\n" * 8)
    yield SessionCompleted(reason="done", first_offset=0, usage=Usage(turns=TURNS), group_id=group)


FINISHED = [
    encode(Event.of(body, id=event_id("bench", str(seq)), source="bench", meta=Meta(epoch=0, seq=seq)))
    for seq, body in enumerate(bodies("group"))
]
"""The records of a finished session after its opening, as stored."""


def write_group(writer: Writer, ordinal: int, *, is_open: bool) -> GroupOpened:
    """One task with its group; of an open one every session stands in the middle of a turn."""
    task = TaskPublished(task_id=f"t{ordinal}", instruction="fix test_total in a.py", files={"a.py": "x = 1\n"})
    ref = writer.put(topics.TASKS.name, task.task_id, task)
    group = group_id(ref)
    members = [session_id(group, attempt) for attempt in range(ATTEMPTS)]
    floor = [writer.ends.get((SESSIONS, number), 0) for number in range(topics.SESSIONS.partitions)]
    opened = GroupOpened(
        group_id=group, lane=LANE.lane, ordinal=ordinal, task=ref, task_id=task.task_id, task_digest=f"d{ordinal}",
        purpose="rl", policy="demo", sessions=members, version=0, deadline_ms=2**53, sessions_floor=floor,
        tasks_low=[ref.offset], idempotency_key=task.task_id,
    )  # fmt: skip
    writer.put(GROUPS, LANE.lane, opened)
    first = {
        one: writer.put(
            SESSIONS, one, SessionOpened(session_id=one, policy="demo", group_id=group, lane=LANE.lane, task=ref)
        )
        for one in members
    }
    last = dict(first)
    if is_open:
        for seq, body in enumerate(bodies(group)):
            if seq > 6:
                return opened
            for one in members:
                meta = Meta() if seq == 0 else Meta(epoch=first[one].offset, seq=seq - 1)
                writer.put(SESSIONS, one, body, meta, f"{one}.{seq}")
    for encoded in FINISHED:  # nobody folds these again, so that whose epoch they name does not matter
        for one in members:
            last[one] = writer.put_encoded(SESSIONS, one, encoded)
    sealed = []
    for attempt, one in enumerate(members):
        span = {"partition": first[one].partition, "first_offset": first[one].offset, "last_offset": last[one].offset}
        reward = RewardAssigned(
            session_id=one,
            group_id=group,
            grader="g",
            grader_version="1",
            components={},
            total=float(attempt % 2),
            **span,
        )
        at = writer.put(topics.REWARDS.name, one, reward)
        sealed.append(SealedMember(session_id=one, status="rewarded", reward=at, **span))
    seal = writer.put(GROUPS, LANE.lane, GroupSealed(group_id=group, lane=LANE.lane, reason="complete", members=sealed))
    if (ordinal + 1) % GROUPS_PER_BATCH == 0:
        write_batch(writer, ordinal // GROUPS_PER_BATCH, seal.offset, members)
    return opened


def write_batch(writer: Writer, ordinal: int, input_offset: int, members: list[str]) -> None:
    rows = [
        BatchMember(
            session_id=one,
            group_id="g",
            partition=0,
            first_offset=0,
            last_offset=1,
            reward=RecordRef("rewards.v1", 0, 0),
            total=1.0,
            advantage=0.5,
            tokens=300,
            trained_tokens=80,
            masked_stale_tokens=0,
            oldest_version=0,
            newest_version=0,
            subject="",
            leaf="0" * 64,
            truncated=False,
        )
        for one in members * GROUPS_PER_BATCH
    ]
    batch = BatchAssembled(
        batch_id=f"b{ordinal}", lane=LANE.lane, policy="demo", ordinal=ordinal, groups=[], dropped=[], members=rows,
        layout=[], merkle_root="0" * 64, assembler_version=1, config_offset=0, input_offset=input_offset,
    )  # fmt: skip
    at = writer.put(topics.BATCHES.name, LANE.lane, batch)
    step = StepCompleted(
        lane=LANE.lane, policy="demo", step=ordinal + 1, batch_id=batch.batch_id, batch_offset=at.offset,
        manifest_key="k", manifest_sha256="s",
    )  # fmt: skip
    writer.put(topics.BATCHES.name, LANE.lane, step)


def write_log(config: KafkaConfig, sessions: int, unfinished: int) -> list[GroupOpened]:
    """The groups that are open at the end."""
    writer = Writer(config)
    writer.put(GROUPS, LANE.lane, LANE)
    published = VersionPublished(policy="demo", version=0, manifest_key="k", manifest_sha256="s", lane=LANE.lane)
    writer.put(topics.WEIGHTS.name, "demo", published)
    closed, left = sessions // ATTEMPTS, unfinished // ATTEMPTS
    for ordinal in range(closed):
        write_group(writer, ordinal, is_open=False)
    opened = [write_group(writer, closed + n, is_open=True) for n in range(left)]
    writer.flush()
    return opened


# -- measured ---------------------------------------------------------------------------------------------------------


def specs(groups: list[GroupOpened]) -> list[SessionSpec]:
    return [
        SessionSpec(
            opened=SessionOpened(session_id=one, policy="demo"),
            message="",
            start=WorkspaceStart("demo", {}),
            history_floor=group.sessions_floor[topics.SESSIONS.partition_of(one)],
        )
        for group in groups
        for one in group.sessions
    ]


async def session_host(config: KafkaConfig, groups: list[GroupOpened]) -> float:
    """What `SessionActor.open` does with its specs until each session has an owner again."""
    wanted = specs(groups)
    async with EventLog(config) as log:
        journal = KafkaJournal(log, "bench")
        began = time.perf_counter()
        histories = await journal.read_many({one.session_id: one.history_floor or 0 for one in wanted})
        owned = [OwnedSession(one, template=TEMPLATE, journal=journal) for one in wanted]
        await asyncio.gather(*(one.take(histories[one.spec.session_id]) for one in owned))
        seconds = time.perf_counter() - began
    assert all(len(one.state.turns) == 2 and one.state.epoch >= 0 for one in owned)
    return seconds


async def whole_topic(config: KafkaConfig) -> tuple[float, int]:
    count = 0
    async with EventLog(config) as log:
        began = time.perf_counter()
        for partition, end in (await log.stable_ends(SESSIONS)).items():
            async for record in log.read(SESSIONS, partition, 0, end):
                count += record.event is not None
        return time.perf_counter() - began, count


async def assembler(config: KafkaConfig) -> float:
    async with EventLog(config) as log:
        with timed((Assembler, "_resume")) as spent:
            running = asyncio.create_task(Assembler(log, LANE.lane).run())
            async with asyncio.timeout(300):
                while not spent and not running.done():  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(0.005)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    return spent["resume"]


class Host:
    """A session actor that takes everything, and remembers what."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.status, self.open = _Method(self._status), _Method(self._open)

    async def _status(self) -> HostStatus:
        return HostStatus("boot", sorted(self.taken), 0.0, "", 0)

    async def _open(self, given: list[SessionSpec]) -> None:
        self.taken.update(one.session_id for one in given)


class _Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


@contextmanager
def timed(*methods: tuple[type, str]) -> Iterator[dict[str, float]]:
    """Seconds in each of these asynchronous methods."""
    spent: dict[str, float] = {}

    def wrapped(name: str, method: Any) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return await method(*given, **named)
            finally:
                spent[name] = round(spent.get(name, 0.0) + time.perf_counter() - began, 3)

        return call

    before = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in before:
        setattr(owner, name, wrapped(name.strip("_"), method))
    try:
        yield spent
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


async def controller(config: KafkaConfig, expected: int, data: Path, *, snapshot: bool = False) -> dict[str, float]:
    """A controller in this process until it has handed over every member of every open group; then, if wanted, until
    it has made a snapshot."""
    hosts: dict[str, Host] = {}
    controller_module.actor_handle = lambda name, _namespace: hosts.setdefault(name, Host())  # type: ignore[attr-defined]
    deployment = Deployment(
        kafka=config, lane=LANE, store=ObjectStoreAddress(endpoint="", bucket="none"), data_dir=str(data),
        tokenizer_file="", warm_start_dir="", session_actors=2, log_level="WARNING",
    )  # fmt: skip
    past_module.SAVE_EVERY = 1 if snapshot else 2**62
    parts = [(Stage, "open"), (PastSnapshots, "recall"), (Past, "advance"), (ControllerActor, "_hand_over")]
    with timed(*parts) as spent:
        began = time.perf_counter()
        actor = ControllerActor(deployment)
        try:
            async with asyncio.timeout(300):
                while sum(len(host.taken) for host in hosts.values()) < expected:  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(0.005)
                found = {"s": round(time.perf_counter() - began, 2), **spent}
                while snapshot and not list(data.glob("controller/*.snapshot")):  # noqa: ASYNC110, ASYNC240
                    await asyncio.sleep(0.005)
            return found | ({"snapshot_made": round(time.perf_counter() - began - found["s"], 2)} if snapshot else {})
        finally:
            await asyncio.to_thread(actor._loop.stop)


async def measure(bootstrap: str, sessions: int, unfinished: int, data: Path) -> dict[str, Any]:
    config = KafkaConfig(bootstrap=bootstrap, prefix=f"recovery-{os.getpid()}-")
    await admin.ensure_topics(config)
    began = time.perf_counter()
    groups = await asyncio.to_thread(write_log, config, sessions, unfinished)
    written = time.perf_counter() - began
    members = sum(len(group.sessions) for group in groups)
    found: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "sessions": sessions,
        "open": members,
        "load": round(os.getloadavg()[0], 1),
    }
    cold = await controller(config, members, data, snapshot=True)
    found["snapshot_made_s"] = cold.pop("snapshot_made")
    found["snapshot_bytes"] = sum(file.stat().st_size for file in data.glob("controller/*.snapshot"))  # noqa: ASYNC240
    found["controller_cold_s"] = cold
    found["controller_s"] = [await controller(config, members, data) for _ in range(REPEATED)]
    found["session_host_s"] = [round(await session_host(config, groups), 2) for _ in range(REPEATED)]
    found["assembler_s"] = [round(await assembler(config), 2) for _ in range(REPEATED)]
    seconds, records = await whole_topic(config)
    return found | {"whole_topic_s": round(seconds, 2), "session_records": records, "written_in_s": round(written, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--sessions", type=int, default=50_000)
    parser.add_argument("--open", type=int, default=104, dest="unfinished")
    options = parser.parse_args()
    with scratch() as data:
        if options.bootstrap:
            found = asyncio.run(measure(options.bootstrap, options.sessions, options.unfinished, data))
        else:
            with running(data, Kafka(data)) as stack:
                address = stack.address("kafka")
                found = asyncio.run(measure(address, options.sessions, options.unfinished, data))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
