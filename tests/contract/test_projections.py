"""The Faust worker against a plain fold of the same log, through a kill and a restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from support.waiting import eventually

from odradek.streams.codec import f32, i32
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import SessionOpened, ToolCompleted, TurnSampled
from odradek.streams.log import EventLog
from odradek.streams.projections.fold import fold
from odradek.streams.projections.views import Snapshot, snapshot
from odradek.streams.testing import an_event, fresh_config
from odradek.streams.transactions import Stage

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

WAIT_S = 90.0
"""Seconds for a worker to start, join its group and catch up on a loaded machine."""
LANES = ("lane-0", "lane-1")


@pytest.fixture
async def log(fresh_config: KafkaConfig) -> AsyncIterator[EventLog]:
    async with EventLog(fresh_config) as log:
        yield log


@contextmanager
def worker(config: KafkaConfig, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The worker as its own process; killed with its whole group at the end."""
    command = [sys.executable, "-m", "odradek.streams.projections", "--bootstrap", config.bootstrap]
    command += ["--prefix", config.prefix, "--data", str(folder), "--snapshot", str(folder / "snapshot.json")]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown_by(folder: Path) -> Snapshot | None:
    path = folder / "snapshot.json"
    return msgspec.json.decode(path.read_bytes(), type=Snapshot) if path.exists() else None


async def shows_the_fold(log: EventLog, folder: Path) -> None:
    meant = snapshot(await fold(log))
    await eventually(lambda: shown_by(folder) == meant, "the tables to show the fold", WAIT_S)


async def a_round(log: EventLog, first: int, count: int) -> None:
    """Groups with rewards and session work, some discarded, some repeated as a retrying writer repeats them."""
    for number in range(first, first + count):
        lane, group = LANES[number % 2], f"g{number}"
        sessions = [f"{group}-s{attempt}" for attempt in range(3)]
        opened = GroupOpened(
            group_id=group,
            lane=lane,
            ordinal=number,
            task=RecordRef(topic="tasks.v1", partition=0, offset=number),
            task_id=f"task-{number % 3}",
            task_digest="d",
            purpose="eval" if number % 4 == 0 else "rl",
            policy="p",
            sessions=sessions,
            version=0,
            deadline_ms=0,
            labels={"set": "unseen"} if number % 4 == 0 else {},
        )
        end = (
            GroupDiscarded(group_id=group, lane=lane, reason="infrastructure", member_tokens=[5, 3])
            if number % 5 == 4
            else GroupSealed(group_id=group, lane=lane, reason="complete", members=[])
        )
        async with Stage(log, f"controller/{lane}", [("groups.v1", int(lane[-1]))]) as stage:
            async with stage.transaction() as transaction:
                await transaction.append_many([("groups.v1", lane, an_event(body)) for body in (opened, end)])
            with pytest.raises(RuntimeError):
                async with stage.transaction() as transaction:
                    phantom = GroupDiscarded(group_id=f"phantom-{number}", lane=lane, reason="refused")
                    await transaction.append("groups.v1", lane, an_event(phantom))
                    raise RuntimeError("never to be seen in a table")
        for attempt, session in enumerate(sessions):
            await work(log, session, number, attempt)
            await reward(log, session, group, number, attempt)
    for lane in LANES:
        number = int(lane[-1])
        await log.wait_stable("groups.v1", number, await log.high_water("groups.v1", number))


async def work(log: EventLog, session: str, number: int, attempt: int) -> None:
    meta = Meta(time_ms=(1000 + number) * 60_000 + attempt)
    turn = TurnSampled(
        turn=0,
        position=0,
        prompt=i32(range(5)),
        completion=i32(range(attempt + 1)),
        logprobs=f32([0.0] * (attempt + 1)),
        spans=[],
        numerics_id="n",
        finish_reason="stop",
        decode_ms=0.1 * number,
    )
    bodies = [
        SessionOpened(session_id=session, policy="p"),
        turn,
        ToolCompleted(call_id="c", turn=0, index=0, text="", is_error=attempt == 2),
    ]
    await log.append_many("sessions.v1", [(session, an_event(body, meta=meta)) for body in bodies])


async def reward(log: EventLog, session: str, group: str, number: int, attempt: int) -> None:
    place = {"session_id": session, "group_id": group, "partition": 0, "first_offset": 0, "last_offset": 1}
    graded = RewardAssigned(
        **place,  # type: ignore[arg-type]
        grader="tests",
        grader_version="1",
        components={"solved": float(attempt == 0), "turns": 0.1 * number},
        total=0.3 * attempt,
        newest_version=number // 4,
        turns=4,
        parallel_turns=attempt,
        reads_before_edit=[True, False, None][attempt],
    )
    bad = RewardUngraded(**place, grader="tests", grader_version="1", cause="sandbox lost")  # type: ignore[arg-type]
    bodies = [bad, graded] if attempt == 1 else [graded, graded]
    await log.append_many("rewards.v1", [(session, an_event(body)) for body in bodies])


async def test_tables_equal_a_plain_fold_through_a_kill_and_a_restart(log: EventLog, tmp_path: Path) -> None:
    await a_round(log, 0, 10)
    with worker(log.config, tmp_path) as process:
        await shows_the_fold(log, tmp_path)
        await a_round(log, 10, 6)
        process.kill()
        process.wait()
    await a_round(log, 16, 6)
    (tmp_path / "snapshot.json").unlink()
    with worker(log.config, tmp_path):
        await shows_the_fold(log, tmp_path)
    view = snapshot(await fold(log))
    assert view.lanes["lane-0"].sealed + view.lanes["lane-1"].sealed == 18
    assert view.ungraded == {"sandbox lost": 22}
    assert "refused" not in view.lanes["lane-0"].discarded
    assert sum(version.sessions for version in view.versions) == 66


async def test_a_record_that_nobody_can_decode_leaves_the_tables_as_they_are(log: EventLog, tmp_path: Path) -> None:
    await a_round(log, 0, 2)
    for topic in ("rewards.v1", "sessions.v1", "groups.v1"):
        await log.append_raw(topic, b"lane-0", b"\xc1", [("ce_type", b"reward.assigned.v1")], partition=0)
    await a_round(log, 2, 2)
    with worker(log.config, tmp_path):
        await shows_the_fold(log, tmp_path)
    assert sum(version.sessions for version in snapshot(await fold(log)).versions) == 12


def test_an_unreachable_broker_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "odradek.streams.projections", "--bootstrap", "127.0.0.1:9"]
    done = subprocess.run([*command, "--data", str(tmp_path / "x")], capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no Kafka broker answers at 127.0.0.1:9" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
    assert not (tmp_path / "x").exists()
