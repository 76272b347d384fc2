"""Kill -9 every kind of actor once while the main job runs: it finishes, and the log alone shows that nothing was lost.

One deployment on the embedded stack, a short training window, small evaluations. The order of the kills follows a
printed seed. What is checked comes from the log and the host, never from the killed processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import lasting

from odradek.infra.cluster.session import Running, deployment_up
from odradek.infra.config.load import load
from odradek.infra.config.services import endpoints
from odradek.infra.demo.run import Demo, DemoOutcome, DemoSettings
from odradek.infra.observe.fold import RunFold
from odradek.infra.stack.testing import scratch
from odradek.streams import topics
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import DecodeError
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.sessions import SessionCompleted, SessionFailed, ToolCompleted
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord, accepted
from odradek.streams.replay.select import bodies

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]

VICTIMS = ["controller", "trainer", "inference-0", "session-0", "environment-0", "assembler", "reward-0"]
SETTINGS = DemoSettings(train_seconds=75.0, new_combinations=6, unseen_identifiers=2, unseen_templates=2)
BEFORE_S, BETWEEN_S = 8.0, 7.0
"""Seconds of undisturbed training before the first kill, and between two: seven fit into the window."""
FLAGS = ["lane.groups_per_batch=3", "session.max_in_flight=48"]


def pid_of(running: Running, name: str) -> int:
    import ray

    return int(ray.get(running.handles[name].__ray_call__.remote(lambda _self: os.getpid()), timeout=60))


async def kill_all(running: Running, seed: int) -> list[str]:
    """One victim after another, spread over the training window; returns who was really killed."""
    order = list(VICTIMS)
    random.Random(seed).shuffle(order)
    killed = []
    await lasting(BEFORE_S)
    for name in order:
        pid = await asyncio.to_thread(pid_of, running, name)
        os.kill(pid, signal.SIGKILL)
        killed.append(name)
        await lasting(BETWEEN_S)
    return killed


async def run_with_kills(running: Running, seed: int) -> tuple[DemoOutcome, list[str]]:
    async with EventLog(running.deployment.kafka) as event_log:
        demo = Demo(running.deployment, SETTINGS, event_log, running.states, print)

        async def kills_in_training() -> list[str]:
            await demo.training_began.wait()
            return await kill_all(running, seed)

        killer = asyncio.create_task(kills_in_training())
        outcome = await demo.run()
        return outcome, await killer


async def sessions_on_the_log(running: Running) -> dict[str, list[SessionRecord]]:
    found: dict[str, list[SessionRecord]] = {}
    async with EventLog(running.deployment.kafka) as event_log:
        for partition, end in (await event_log.stable_ends(topics.SESSIONS.name)).items():
            async for record in event_log.read(topics.SESSIONS.name, partition, 0, end):
                with contextlib.suppress(DecodeError):
                    event = record.event
                    row = (record.ref.offset, event.id, event.meta, event.body)
                    found.setdefault(record.key or "", []).append(row)
    return found


async def batch_history(kafka: KafkaConfig, lane: str) -> list[BatchAssembled | StepCompleted]:
    number = topics.BATCHES.partition_of(lane)
    async with EventLog(kafka) as event_log:
        return [record.event.body async for record in event_log.read(topics.BATCHES.name, number, 0)]


def sandbox_processes(data: Path) -> list[str]:
    """Command lines of live processes that name this deployment's sandboxes."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(data / "sandboxes") in line]


class Result:
    """What one run left behind."""

    def __init__(self, data: Path, seed: int) -> None:
        config = load(flags=FLAGS, data=data, environment={}).config
        with deployment_up(config, print) as running:
            self.outcome, self.killed = asyncio.run(run_with_kills(running, seed))
            self.sessions = asyncio.run(sessions_on_the_log(running))
            self.history = asyncio.run(batch_history(running.deployment.kafka, running.deployment.lane.lane))
        self.data, self.config = data, config
        self.left = sandbox_processes(data)
        self.fold: RunFold = self.outcome.fold


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    seed = int(os.environ.get("ODRADEK_CRASH_SEED", "7"))
    print(f"crash seed {seed}: rerun with ODRADEK_CRASH_SEED={seed}")
    with scratch() as data:
        yield Result(data, seed)


def test_every_kind_of_actor_was_killed_and_the_job_finished(result: Result) -> None:
    assert sorted(result.killed) == sorted(VICTIMS)
    assert result.outcome.final_version >= 1
    assert sum(c.sessions for c in result.outcome.last.values()) == 10


def test_no_batch_is_trained_twice_and_none_is_skipped(result: Result) -> None:
    """Guarantee 4."""
    batches = [b for b in result.history if isinstance(b, BatchAssembled)]
    steps = [s for s in result.history if isinstance(s, StepCompleted)]
    assert [b.ordinal for b in batches] == list(range(len(batches)))
    assert [s.step for s in steps] == list(range(1, len(steps) + 1))
    assert [s.batch_id for s in steps] == [b.batch_id for b in batches]
    members = Counter(m.session_id for b in batches for m in b.members)
    assert not [session for session, count in members.items() if count > 1]


def test_no_group_is_lost(result: Result) -> None:
    """Every opened group ended as sealed or discarded with a reason."""
    fold = result.fold
    assert fold.groups and not fold.open_groups
    rl = [g for g in fold.groups.values() if g.purpose == "rl"]
    assert len(rl) + sum(g.purpose == "eval" for g in fold.groups.values()) == len(fold.groups)
    assert fold.sealed + sum(fold.discarded.values()) >= len(fold.groups)


def test_every_batch_is_rebuilt_byte_identical(result: Result) -> None:
    """Guarantee 5."""
    report = result.outcome.rebuild
    assert report is not None and report.batches
    assert report.identical == len(report.batches), str(report)


def test_no_call_with_a_logged_result_was_run_again(result: Result) -> None:
    """Guarantee 3: one completion record a call, over all owners of a session."""
    for session, records in result.sessions.items():
        completed = Counter(body.call_id for *_, body in records if isinstance(body, ToolCompleted))
        assert not [call for call, count in completed.items() if count > 1], session


def test_every_session_ended_with_a_reason(result: Result) -> None:
    for session, records in result.sessions.items():
        ends = [b for *_, b in accepted(records) if isinstance(b, SessionCompleted | SessionFailed)]
        assert len(ends) == 1, session


def test_a_failure_of_ours_is_never_a_reward(result: Result) -> None:
    """Guarantee 11: no session that failed for a fault of ours has a score."""
    failed = {
        session
        for session, records in result.sessions.items()
        for *_, body in accepted(records)
        if isinstance(body, SessionFailed)
    }
    assert not failed & set(result.fold.verdicts)


def test_no_sandbox_is_left(result: Result) -> None:
    assert result.left == []


async def branched(kafka: KafkaConfig, policy: str) -> tuple[list[LaneConfigured], list[VersionPublished]]:
    """What the log says of the policy's lanes and versions."""
    async with EventLog(kafka) as event_log:
        said = [body for topic in ("groups.v1", "weights.v1") async for body in bodies(event_log, topic)]
    ours = [body for body in said if getattr(body, "policy", "") == policy]
    lanes = [body for body in ours if isinstance(body, LaneConfigured)]
    return lanes, [body for body in ours if isinstance(body, VersionPublished)]


def test_a_branch_trains_on_from_an_earlier_version_and_leaves_the_main_line_alone(result: Result) -> None:
    """`odradek train --from`, end to end: off version 1 of the run before, to the branch's first version of its own."""
    odradek, where = Path(sys.executable).with_name("odradek"), ["--data", str(result.data)]
    flags = [part for flag in [*FLAGS, "demo.steps=1"] for part in ("--set", flag)]
    train = [odradek, "train", "--from", "1", "--policy", "twig", "--minutes", "10", "--keep", "--json", *where, *flags]
    try:
        done = subprocess.run(train, capture_output=True, text=True, timeout=800, check=False)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout
        kafka, main = endpoints(result.config).kafka, result.config.lane
        lanes, versions = asyncio.run(branched(kafka, "twig"))
        history = asyncio.run(batch_history(kafka, main.name))
    finally:
        subprocess.run([odradek, "down", *where], capture_output=True, timeout=200, check=True)
    told = json.loads(done.stdout)
    assert (told["policy"], told["lane"], told["versions"][0]) == ("twig", "twig-2", 2)
    assert told["identical"] == told["batches"] >= 1
    assert [(one.lane, one.parent and (one.parent.policy, one.parent.version)) for one in lanes] == [
        ("twig-2", (main.policy, 1))
    ]
    assert [one.version for one in versions] == [1, *told["versions"]]
    assert history == result.history, "the parent's history is only read"
