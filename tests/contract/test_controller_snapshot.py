"""A controller that starts from a snapshot, on a real broker: it is where the log is, and a snapshot that is not of
this log, this release or these settings is dropped with a warning (actors/controller/past.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.records_to_delete import RecordsToDelete
from support.controller_world import LANE, TESTS, plain
from support.waiting import eventually

from odradek.actors.controller import actor as actor_module
from odradek.actors.controller import past as past_module
from odradek.actors.controller.core import Controller
from odradek.actors.controller.identity import group_id, session_id
from odradek.actors.controller.past import Past, PastSnapshots
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.streams import admin, topics
from odradek.streams.clients import partition
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record, event_id
from odradek.streams.errors import UndecodableRecord
from odradek.streams.events.groups import GroupDiscarded, GroupEvent, GroupOpened, GroupSealed, SealedMember
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.events.weights import CurrentWeights, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import an_event, fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

GROUPS = topics.GROUPS.name


def deployment(config: KafkaConfig, data: Path, **other: Any) -> Deployment:
    one = Deployment(
        kafka=config, lane=LANE, store=ObjectStoreAddress(endpoint="", bucket="none"), data_dir=str(data),
        tokenizer_file="", warm_start_dir="", session_actors=1,
    )  # fmt: skip
    return msgspec.structs.replace(one, **other)


def decisions(first: int, count: int) -> list[GroupEvent]:
    """Groups opened; the even ones sealed with a session that never ended, every third of the others discarded."""
    made: list[GroupEvent] = [LANE] if first == 0 else []
    for ordinal in range(first, first + count):
        task = RecordRef("tasks.v1", 0, ordinal)
        group = group_id(task)
        members = [session_id(group, attempt) for attempt in range(2)]
        made.append(
            GroupOpened(
                group_id=group,
                lane=LANE.lane,
                ordinal=ordinal,
                task=task,
                task_id=f"t{ordinal}",
                task_digest="d",
                purpose="rl",
                policy="demo",
                sessions=members,
                version=0,
                deadline_ms=2**53,
                tasks_low=[ordinal],
            )
        )
        if ordinal % 2 == 0:
            rows = [SealedMember(session_id=one, status="missing") for one in members]
            made.append(GroupSealed(group_id=group, lane=LANE.lane, reason="deadline", members=rows))
        elif ordinal % 3 == 0:
            made.append(GroupDiscarded(group_id=group, lane=LANE.lane, reason="deadline", detail="", task=task))
    return made


async def append(log: EventLog, made: list[GroupEvent]) -> None:
    for number, body in enumerate(made):
        await log.append(GROUPS, LANE.lane, an_event(body, "snapshot", number))
        if isinstance(body, GroupSealed):
            one = body.members[0].session_id
            verdict = RewardAssigned(
                session_id=one, group_id=body.group_id, partition=0, first_offset=0, last_offset=1, grader="g",
                grader_version="1", components={}, total=0.0,
            )  # fmt: skip
            await log.append(topics.REWARDS.name, one, an_event(verdict, "snapshot", one))


async def none(record: Record, _error: UndecodableRecord) -> None:
    raise AssertionError(f"{record.ref} is not readable")


async def started(log: EventLog, of: Deployment) -> tuple[Past, Any, int]:
    """A start; what the controller goes on with; and how many decisions were folded from the log for it."""
    past = await PastSnapshots(log, of).recall(Controller(of.lane, of.max_sessions))
    await past.advance(log, none, 0)
    return past, plain([past.core, list(past.core.groups), past.low, past.configured]), past.folded


async def remembered(log: EventLog, of: Deployment) -> Any:
    """A snapshot in the middle of the decisions on the log; returns what the whole log says."""
    await append(log, decisions(0, 9))
    snapshots = PastSnapshots(log, of)
    snapshots.unsaved = past_module.SAVE_EVERY
    snapshots.turn()
    assert snapshots._making is not None
    await snapshots._making
    await append(log, decisions(9, 3))
    return (await started(log, msgspec.structs.replace(of, data_dir="")))[1]


async def test_a_start_knows_every_version_before_it_decides_what_is_served(
    fresh_config: KafkaConfig, tmp_path: Path
) -> None:
    """One that knew a part of them would set what is served back to the newest of that part."""
    of = deployment(fresh_config, tmp_path)
    async with EventLog(fresh_config) as log:
        for number in range(3):
            version = VersionPublished(policy="demo", version=number, manifest_key=f"k{number}", manifest_sha256="0")
            await log.append(topics.WEIGHTS.name, "demo", an_event(version, "version", number))
        served = CurrentWeights(policy="demo", version=2, manifest_key="k2", manifest_sha256="0")
        await log.append(topics.WEIGHTS_CURRENT.name, "demo", an_event(served))
        core = (await started(log, of))[0].core
    assert sorted(core.weights["demo"].published) == [0, 1, 2]
    assert core.decide_weights() == []


async def test_a_start_from_a_snapshot_is_a_start_from_the_log(fresh_config: KafkaConfig, tmp_path: Path) -> None:
    of = deployment(fresh_config, tmp_path)
    async with EventLog(fresh_config) as log:
        whole = await remembered(log, of)
        past, found, folded = await started(log, of)
    assert found == whole and folded == len(decisions(9, 3)), "no more than what came after it"
    assert past.core.groups and list(past.core.endings), "some group is open, and somebody is still to end"


@pytest.mark.parametrize("fault", ["renamed field", "older release", "damaged", "other settings", "other deployment"])
async def test_case_protean_1362_a_snapshot_that_cannot_be_taken_is_dropped_and_the_log_gives_the_state(
    fresh_config: KafkaConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """proteanhq/protean #1362, PR 1518: a snapshot from an older schema cannot load and nothing falls back. Here: a
    snapshot, a state field renamed, three more groups, reload."""
    of = deployment(fresh_config, tmp_path)
    async with EventLog(fresh_config) as log:
        if fault == "renamed field":  # though the code's hash is right
            export = Past.export
            monkeypatch.setattr(Past, "export", lambda past: export(past).replace(b"opened_count", b"opened_total"))
        whole = await remembered(log, of)
        (file,) = (tmp_path / "controller").iterdir()
        if fault == "older release":
            monkeypatch.setattr(past_module, "code_hash", lambda *_modules: "another release")
        elif fault == "other settings":
            of = msgspec.structs.replace(of, max_sessions=9)
        elif fault == "other deployment":
            of = msgspec.structs.replace(of, incarnation="1")
        elif fault == "damaged":
            file.write_bytes(file.read_bytes()[:-9])
        with caplog.at_level(logging.WARNING):
            _, found, folded = await started(log, of)
        assert [one for one in caplog.messages if "is dropped, the log is folded instead" in one] and not file.exists()
        assert folded == len(decisions(0, 12))
        if fault != "other settings":
            assert found == whole


async def anew(config: KafkaConfig, *names: str) -> None:
    """The topics removed and made again."""
    client = AIOKafkaAdminClient(bootstrap_servers=config.bootstrap)
    await client.start()
    try:
        await client.delete_topics([config.name(name) for name in names])

        async def gone() -> bool:
            return not {config.name(name) for name in names} & set(await client.list_topics())

        await eventually(gone, "the topics to be gone")
    finally:
        await client.close()
    await admin.ensure_topics(config)


@pytest.mark.parametrize("more", [-2, 0, 2])
async def test_the_same_events_written_again_to_a_log_made_anew_are_another_log(
    fresh_config: KafkaConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """Event ids are deterministic, so they alone say nothing. The log is shorter, as long or longer than before."""
    of = deployment(fresh_config, tmp_path)
    async with EventLog(fresh_config) as log:
        await remembered(log, of)
    await anew(fresh_config, GROUPS, topics.REWARDS.name)
    async with EventLog(fresh_config) as log:
        await append(log, decisions(0, 9 + more))
        _, found, folded = await started(log, of)
        assert "is dropped, the log is folded instead" in caplog.text
        assert ("ends at" if more < 0 else "holds another record") in caplog.text
        assert folded == len(decisions(0, 9 + more))
        assert found == (await started(log, msgspec.structs.replace(of, data_dir="")))[1]


async def test_a_log_whose_beginning_was_removed_is_folded_from_where_it_begins(
    fresh_config: KafkaConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of = deployment(fresh_config, tmp_path)
    async with EventLog(fresh_config) as log:
        await remembered(log, of)
        client = AIOKafkaAdminClient(bootstrap_servers=fresh_config.bootstrap)
        await client.start()
        await client.delete_records({partition(fresh_config, GROUPS, 0): RecordsToDelete(before_offset=3)})
        await client.close()
        _, found, folded = await started(log, of)
        assert "begins at 3, expected 0" in caplog.text and folded == len(decisions(0, 12)) - 3
        assert found == (await started(log, msgspec.structs.replace(of, data_dir="")))[1]


# -- the actor --------------------------------------------------------------------------------------------------------


class Gone:
    """A session host that is away."""

    class _Method:
        async def remote(self, *_arguments: object) -> None:
            raise TimeoutError

    status = open = post = _Method()


@pytest.fixture
async def log(fresh_config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EventLog]:
    monkeypatch.setattr(actor_module, "actor_handle", lambda _name, _namespace: Gone())
    await admin.ensure_topics(fresh_config)
    async with EventLog(fresh_config) as log:
        yield log


async def test_a_controller_makes_snapshots_while_it_works_and_starts_from_the_last(
    fresh_config: KafkaConfig, log: EventLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(past_module, "SAVE_EVERY", 1)
    of = deployment(fresh_config, tmp_path)
    loaded: list[int] = []
    restore = Past.restore
    monkeypatch.setattr(
        Past, "restore", lambda past, state, marks: (loaded.append(state.opened_count), restore(past, state, marks))[1]
    )

    async def until(wanted: int) -> None:
        async def so() -> bool:
            found = [one async for one in bodies(log, GROUPS) if isinstance(one, GroupDiscarded)]
            files = await asyncio.to_thread(lambda: list((tmp_path / "controller").glob("*.snapshot")))
            return len(found) == wanted and bool(files)

        await eventually(so, f"{wanted} decisions and a snapshot")

    await log.append(topics.WEIGHTS.name, "demo", an_event(VersionPublished(
        policy="demo", version=0, manifest_key="k", manifest_sha256="0")))  # fmt: skip
    for run in range(2):
        actor = actor_module.ControllerActor(of)
        try:
            for name in ("a", "b"):  # refused: decided without any host
                task = TaskPublished(task_id=f"{name}{run}", instruction="x", tests=TESTS, attempts=0)
                await log.append(topics.TASKS.name, name, an_event(task, event_id("t", name, run)))
            await until(2 * (run + 1))
        finally:
            await asyncio.to_thread(actor._loop.stop)
    assert loaded and "snapshot" not in caplog.text
