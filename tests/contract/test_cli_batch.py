"""`odradek batch` on a real log with no actor running: from a batch to its events, and from data to versions."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from support.cli import Cli
from support.small_log import LANE, offset_of, write_small_log

from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.batches import StepCompleted
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def config(kafka_bootstrap: str) -> KafkaConfig:
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")

    async def write() -> None:
        await ensure_topics(made)
        async with EventLog(made) as log:
            await lineage_log(log)

    asyncio.run(write())
    return made


async def lineage_log(log: EventLog) -> None:
    """Batch 0 makes version 1; batch 1 leaves `d.1` out and makes version 2; policy `other` branches off version 1;
    version 3 is given up and version 2 restored into another incarnation. Policy `stranger` is of other blood."""
    small = await write_small_log(log)
    await small.group("d", [1.0, 0.0], version=1)
    _, second = await small.batches(2)
    step = StepCompleted(
        lane=LANE.lane, policy="demo", step=2, batch_id=second.batch_id, batch_offset=await offset_of(log, second),
        manifest_key="0/demo/main-0/2", manifest_sha256="0" * 64, left_out=["d.1"],
    )  # fmt: skip
    await small.append("batches.v1", LANE.lane, step, "step", 2)
    await small.published(2, second.batch_id)
    for policy, version, key, parent_key in (
        ("other", 1, "0/other/other-2/1", "0/demo/main-0/1"),
        ("other", 2, "0/other/other-2/2", ""),
        ("demo", 3, "0/demo/main-0/3", ""),
        ("demo", 2, "0-r1/demo/main-0/2", "0/demo/main-0/2"),
        ("stranger", 1, "0/stranger/s-2/1", "0/demo/main-0/0"),
    ):
        body = VersionPublished(
            policy=policy, version=version, manifest_key=key, manifest_sha256="0" * 64, parent=version - 1,
            parent_key=parent_key, restored=key.startswith("0-r1/"),
            batch_id=second.batch_id if key.startswith("0-r1/") else "",
        )  # fmt: skip
        await small.append("weights.v1", policy, body, key)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], config: KafkaConfig) -> Cli:
    return Cli(capsys, config)


def reached(answer: object) -> list[tuple[str, int, str]]:
    return [(one["policy"], one["version"], one["how"]) for one in answer["versions"]]  # type: ignore[index]


def test_a_batch_is_explained_from_its_version_down_to_each_event_and_task(cli: Cli) -> None:
    first, second = cli("batch", "list", "--json").json
    assert (first["ordinal"], first["version"], second["version"]) == (0, 1, 2)
    found = cli("batch", "explain", first["batch_id"][:13], "--events", "--json").json
    assert (found["batch_id"], found["version"], found["metrics"]) == (first["batch_id"], 1, {"loss": 0.5})
    assert [group["task_id"] for group in found["groups"]] == ["task-a", "task-b"]
    assert [one["reason"] for one in found["dropped"]] == ["flat"]
    member = found["groups"][0]["members"][0]
    events = found["events"][member["session_id"]]
    assert [one["type"] for one in events] == [
        "session.opened.v1", "message.received.v1", "turn.sampled.v1", "tool.requested.v1", "tool.completed.v1",
        "turn.sampled.v1", "session.completed.v1",
    ]  # fmt: skip
    assert events[0]["at"] == f"sessions.v1/{member['partition']}@{member['first_offset']}"
    text = cli("batch", "explain", first["batch_id"], "--events").out
    for part in ("version 1 of demo (0/demo/main-0/1)", "task-a (tasks.v1/", "turn.sampled.v1", "dropped: group flat"):
        assert part in text, part


def test_an_unknown_or_ambiguous_batch_is_named(cli: Cli) -> None:
    unknown = cli("batch", "explain", "nothing")
    assert unknown.code == 2 and "no batch 'nothing'" in unknown.err
    several = cli("batch", "explain", "")
    assert several.code == 2 and "2 batches begin with ''" in several.err
    assert cli("batch", "seen").code == 2
    assert cli("batch", "seen", "--task", "a", "--session", "b").code == 2


def test_nobody_saw_it_is_never_the_answer_to_a_wrong_id(cli: Cli) -> None:
    for wrong, said in (
        (("--session", "a.9"), "no session 'a.9'"),
        (("--task", "task-z"), "no attempt at task 'task-z'"),
    ):
        answer = cli("batch", "seen", *wrong)
        assert (answer.code, answer.out) == (2, "") and said in answer.err
    mixed = cli("batch", "seen", "--session", "a.0", "--session", "a.9")
    assert mixed.code == 2 and "no session 'a.9'" in mixed.err
    assert "is the id right?" in cli("batch", "seen", "--subject", "nobody").out


def test_a_session_s_tokens_are_followed_to_every_version_they_reached(cli: Cli) -> None:
    """Over later steps, a branch and a restore; not to what was there before, nor to another policy's versions."""
    found = cli("batch", "seen", "--session", "a.0", "--json").json
    assert [(one["ordinal"], one["sessions"], one["version"]) for one in found["batches"]] == [(0, ["a.0"], 1)]
    assert reached(found) == [
        ("demo", 1, "trained"),
        ("demo", 2, "inherited"),
        ("other", 1, "inherited"),
        ("other", 2, "inherited"),
        ("demo", 3, "inherited"),
        ("demo", 2, "inherited"),
    ]
    assert "inherited version 2 of other (0/other/other-2/2)" in cli("batch", "seen", "--session", "a.0").out


def test_a_session_that_was_left_out_at_the_step_reached_no_version(cli: Cli) -> None:
    kept = cli("batch", "seen", "--session", "d.0", "--json").json
    assert reached(kept) == [("demo", 2, "trained"), ("demo", 3, "inherited"), ("demo", 2, "inherited")]
    out = cli("batch", "seen", "--session", "d.1", "--json").json
    assert [one["left_out"] for one in out["batches"]] == [["d.1"]] and reached(out) == []
    assert "no batch holds any" in cli("batch", "seen", "--session", "flat.0").out


def test_a_task_is_followed_by_all_of_its_attempts(cli: Cli) -> None:
    found = cli("batch", "seen", "--task", "task-b", "--json").json
    assert found["sessions"] == ["b.0", "b.1"]
    assert [one["sessions"] for one in found["batches"]] == [["b.0", "b.1"]]
    assert cli("batch", "seen", "--subject", "nobody", "--json").json == {"sessions": [], "batches": [], "versions": []}


def test_versions_given_up_by_a_restore_are_not_listed_as_the_policy_s(cli: Cli) -> None:
    assert [one["version"] for one in cli("weights", "list", "--json").json] == [0, 1, 2]
    assert cli("weights", "explain", 3).code == 2
    explained = cli("weights", "explain", 2).out
    assert "restored from 0/demo/main-0/2" in explained and "trained on batch 1" in explained
    assert "branched off 0/demo/main-0/1" in cli("weights", "explain", 1, "--policy", "other").out
