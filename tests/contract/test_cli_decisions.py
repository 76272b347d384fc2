"""`odradek weights`, `subject` and `dlq` on a real log with no actor running: decisions are events, and told."""

from __future__ import annotations

import asyncio
import getpass
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from support.cli import Cli
from support.small_log import LANE, SmallLog, write_small_log

from odradek.actors.controller.core import Controller
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.dlq import DeadLetters, Why
from odradek.streams.envelope import Record
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.weights import CurrentWeights, ReplicaReported, VersionPruned, VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies

pytestmark = pytest.mark.contract
T = TypeVar("T")


@pytest.fixture(scope="module")
def config(kafka_bootstrap: str) -> KafkaConfig:
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")

    async def write() -> None:
        await ensure_topics(made)
        async with EventLog(made) as log:
            await write_small_log(log)

    asyncio.run(write())
    return made


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], config: KafkaConfig) -> Cli:
    return Cli(capsys, config)


def on_log(config: KafkaConfig, work: Callable[[EventLog], Awaitable[T]]) -> T:
    async def opened() -> T:
        async with EventLog(config) as log:
            return await work(log)

    return asyncio.run(opened())


def served(config: KafkaConfig) -> int | None:
    """What the controller's own fold of weights.v1 says to serve."""

    async def fold(log: EventLog) -> int | None:
        core = Controller(LANE)
        async for body in bodies(log, "weights.v1"):
            core.on_weights(body)
        return core.weights["demo"].current

    return on_log(config, fold)


def test_versions_are_listed_with_who_serves_them(cli: Cli, config: KafkaConfig) -> None:
    async def report(log: EventLog) -> None:
        small = SmallLog(log)
        current = CurrentWeights(policy="demo", version=1, manifest_key="k", manifest_sha256="s")
        await small.append("weights.current.v1", "demo", current, 1)
        for replica, version, healthy in (
            ("inference-0", 0, True),
            ("inference-0", 1, True),
            ("inference-1", 1, False),
        ):
            detail = "" if healthy else "a shard is gone"
            body = ReplicaReported(replica=replica, policy="demo", version=version, healthy=healthy, detail=detail)
            await small.append("replicas.v1", replica, body, replica, version)

    on_log(config, report)
    first, second = cli("weights", "list", "--json").json
    assert (first["version"], first["batch_id"], first["replicas"]) == (0, "", [])
    assert (second["version"], second["parent"], second["marks"]) == (1, 0, ["current"])
    assert second["replicas"] == ["inference-0"] and second["refused"] == {"inference-1": "a shard is gone"}
    text = cli("weights", "list").out.splitlines()
    assert "warm start" in text[0] and "served by inference-0" in text[1]
    assert text[2].strip() == "inference-1: a shard is gone"


def test_a_pin_and_a_roll_back_are_what_the_controller_folds(cli: Cli, config: KafkaConfig) -> None:
    assert served(config) == 1
    assert cli("weights", "pin", 0, "--reason", "audit").code == 0
    assert served(config) == 0
    assert cli("weights", "unpin").code == 0
    assert served(config) == 1
    again = cli("weights", "unpin")
    assert again.code == 2 and "is not pinned" in again.err
    assert cli("weights", "rollback", 0, "--json").json["decision"]["to_version"] == 0
    assert served(config) == 0
    assert cli("weights", "list", "--json").json[0]["marks"] == ["rolled back to"]
    for decision in ("pin", "rollback", "explain"):
        missing = cli("weights", decision, 7)
        assert missing.code == 2 and "no version 7; it has 0, 1" in missing.err


def test_a_version_is_explained_down_to_its_sessions_and_tasks(cli: Cli) -> None:
    found = cli("weights", "explain", 1, "--json").json
    assert (found["parent"], found["batch_ordinal"], found["metrics"]) == (0, 0, {"loss": 0.5})
    assert [group["task_id"] for group in found["groups"]] == ["task-a", "task-b"]
    assert [member["session_id"] for group in found["groups"] for member in group["members"]] == [
        "a.0",
        "a.1",
        "b.0",
        "b.1",
    ]
    text = cli("weights", "explain", 1, "--sessions").out
    assert "task-a (tasks.v1/" in text and "advantage +0.5" in text
    assert "no batch made it" in cli("weights", "explain", 0).out


def test_consent_is_granted_shown_and_withdrawn(cli: Cli) -> None:
    assert cli("subject", "consent", "show", "carol", "--json").json["consent"] is False
    assert cli("subject", "consent", "grant", "carol").code == 0
    assert cli("subject", "consent", "show", "carol").out == "carol: granted\n"
    assert cli("subject", "consent", "withdraw", "carol", "--reason", "asked").code == 0
    assert cli("subject", "consent", "show", "carol", "--json").json["consent"] is False
    assert cli("subject", "consent", "grant", " ").code == 2


def test_a_dead_letter_is_listed_shown_released_and_dropped(cli: Cli, config: KafkaConfig) -> None:
    assert cli("dlq", "list").out == "no dead letters\n"

    async def put(log: EventLog) -> list[int]:
        letters = DeadLetters(log)
        refs = []
        for offset, key in ((4, b"k"), (5, b"k"), (9, b"\xfe")):
            ref = RecordRef("rewards.v1", 1, offset)
            record = Record(ref, key, b"\xffbytes", (("ce_type", b"x.v1"), ("odd", b"\xfe")), 5)
            refs.append((await letters.put("graders", record, Why.DECODE, "no such type", 0)).offset)
        return refs

    first, second, third = on_log(config, put)
    listed = cli("dlq", "list", "--json").json
    assert [one["letter"] for one in listed] == [first, second, third]
    assert (listed[0]["origin"], listed[0]["why"], listed[0]["error"]) == ("rewards.v1/1@4", "decode", "no such type")
    assert cli("dlq", "list", "--consumer", "nobody", "--json").json == []
    shown = cli("dlq", "show", third).out
    assert "\\xffbytes" in shown and "odd: \\xfe" in shown
    assert [one["letter"] for one in cli("dlq", "release", second, "--json").json] == [first, second]
    assert "Missing option '--reason'" in cli("dlq", "drop", third).err
    assert cli("dlq", "drop", third, "--reason", "junk", "--by", "ann").code == 0
    for decision in ("release", "drop"):
        settled = cli("dlq", decision, third, "--reason", "again")
        assert settled.code == 2 and "dropped already" in settled.err
    dropped = cli("dlq", "list", "--settled", "--json").json[-1]
    assert (dropped["state"], dropped["decided_by"], dropped["reason"]) == ("dropped", "ann", "junk")
    assert "(dropped by ann: junk)" in cli("dlq", "show", third).out
    assert {one["decided_by"] for one in cli("dlq", "list", "--json").json} == {getpass.getuser()}
    assert [one["state"] for one in cli("dlq", "list", "--json").json] == ["released", "released"]
    assert len(cli("dlq", "list", "--settled", "--json").json) == 3
    assert cli("dlq", "show", 10_000).code == 2


def test_a_pruned_version_is_shown_and_refused_by_name(cli: Cli, config: KafkaConfig) -> None:
    """Asked for, it could never be loaded; its lineage stays."""

    async def prune(log: EventLog) -> None:
        small = SmallLog(log)
        newer = VersionPublished(policy="demo", version=2, manifest_key="k2", manifest_sha256="s", parent=1)
        await small.append("weights.v1", "demo", newer, 2)
        await small.append("weights.v1", "demo", VersionPruned(policy="demo", versions=[0]), "pruned")

    on_log(config, prune)
    assert "pruned" in cli("weights", "list", "--json").json[0]["marks"]
    for asked in (("weights", "pin", 0), ("weights", "rollback", 0)):
        refused = cli(*asked)
        assert refused.code == 2 and "version 0 of policy demo was pruned; kept are 1, 2" in refused.err
    assert served(config) == 2
    refused = cli("eval", "--version", 0, "--count", 1)
    assert refused.code == 2 and "version 0 was pruned" in refused.err
    assert cli("weights", "explain", 0).code == 0
