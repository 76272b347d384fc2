"""`odradek task publish|cancel` against a real broker with no actor running."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.cli import Cli

from odradek.actors.controller.core import Controller
from odradek.actors.environment.archive import unpack
from odradek.actors.tasks.directory import load_task_dir, write_task_dir
from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.publish import as_spec
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.tasks import TaskCancelled, TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import key

__all__ = ["key"]
pytestmark = pytest.mark.contract


@pytest.fixture
def config(kafka_bootstrap: str, topic_prefix: str) -> KafkaConfig:
    """A deployment whose topics do not exist yet."""
    return KafkaConfig(bootstrap=kafka_bootstrap, prefix=topic_prefix)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], config: KafkaConfig) -> Cli:
    return Cli(capsys, config)


def tasks_on(config: KafkaConfig) -> list[Record]:
    async def read() -> list[Record]:
        async with EventLog(config) as log:
            numbers = await log.partitions("tasks.v1")
            return [record for number in numbers async for record in log.read("tasks.v1", number, 0)]

    return asyncio.run(read())


def directory(tmp_path: Path, count: int = 1) -> Path:
    for index in range(count):
        spec = as_spec(make_task("train", 11, index))
        write_task_dir(spec, tmp_path / "tasks" / spec.name)
    return tmp_path / "tasks"


def queued(records: list[Record]) -> int:
    """How many tasks the controller would see in these records."""
    core = Controller(LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=8, max_staleness=2))
    for record in records:
        core.on_task(record.ref, record.event.body)
    return len(core.queue)


def test_a_directory_is_published_with_only_a_broker_running(cli: Cli, config: KafkaConfig, tmp_path: Path) -> None:
    task = directory(tmp_path) / "train-11-0"
    done = cli("task", "publish", task, "--attempts", 3, "--deadline", 60, "--priority", 2, "--policy-version", 1)
    assert done.code == 0 and done.out.startswith("published train-11-0 at tasks.v1/")
    (record,) = tasks_on(config)
    body = record.event.body
    assert isinstance(body, TaskPublished)
    assert (body.attempts, body.deadline_seconds, body.priority, body.policy_version) == (3, 60.0, 2, 1)
    assert body.files == load_task_dir(task).published().files and body.tests is not None


def test_the_same_key_twice_is_one_task_and_another_key_is_another(
    cli: Cli, config: KafkaConfig, tmp_path: Path
) -> None:
    tasks = directory(tmp_path, 2)
    assert cli("task", "publish", tasks).code == 0
    assert cli("task", "publish", tasks).code == 0
    assert queued(tasks_on(config)) == 2
    again = cli("task", "publish", tasks, "--idempotency-key", "second", "--json")
    assert [one["idempotency_key"] for one in again.json] == ["second/train-11-0", "second/train-11-1"]
    records = tasks_on(config)
    assert (len(records), queued(records)) == (6, 4)
    assert len({record.event.id for record in records}) == 4


def test_a_broken_directory_publishes_nothing_and_says_so_in_one_line(
    cli: Cli, config: KafkaConfig, tmp_path: Path
) -> None:
    """A set with a broken member is refused whole, before the first task is on the log."""
    tasks = directory(tmp_path, 3)
    (tasks / "train-11-1" / "task.toml").write_text('[metadata]\ndescription = "\\d"\n')
    refused = cli("task", "publish", tasks)
    assert refused.code == 2 and refused.out == ""
    (line,) = refused.err.splitlines()
    assert "1 of 3" in line and "train-11-1/task.toml:2: " in line
    assert cli("task", "publish", tasks / "train-11-0").code == 0
    assert len(tasks_on(config)) == 1


def test_a_cancelled_task_is_never_opened(cli: Cli, config: KafkaConfig, tmp_path: Path) -> None:
    cli("task", "publish", directory(tmp_path))
    done = cli("task", "cancel", "train-11-0", "--reason", "changed my mind", "--json")
    assert done.code == 0 and (done.json["task_id"], done.json["known"]) == ("train-11-0", True)
    bodies = [record.event.body for record in tasks_on(config)]
    assert bodies[1] == TaskCancelled(task_id="train-11-0", reason="changed my mind")
    assert queued(tasks_on(config)) == 0
    unknown = cli("task", "cancel", "train-11-O")
    assert unknown.code == 0 and "no task of that id is on tasks.v1: is it right?" in unknown.out


def test_a_workspace_that_an_event_cannot_carry_is_stored_before_the_task_is_published(
    cli: Cli, config: KafkaConfig, tmp_path: Path, s3_config: dict[str, str]
) -> None:
    """A binary file: the event names the tar, which is in the object store with the digest it names."""
    (task,) = directory(tmp_path).iterdir()
    (task / "environment" / "workspace" / "logo.bin").write_bytes(b"\xff\x00\x01")
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    where = {"endpoint": s3_config["endpoint"], "bucket": s3_config["bucket"], "credentials_file": str(keys)}
    store = [part for name, value in where.items() for part in ("--set", f"s3.{name}={value}")]
    assert cli("task", "publish", task, *store).code == 0
    (record,) = tasks_on(config)
    ref = record.event.body.files_ref
    assert record.event.body.files == {} and ref is not None

    async def stored() -> bytes:
        return await BlobStore(S3Store(S3Config(**s3_config))).get(ref)

    tree = unpack(asyncio.run(stored()))
    assert tree["logo.bin"].content == b"\xff\x00\x01"
    assert {path: file.content for path, file in tree.items()} == load_task_dir(task).files
    assert queued([record]) == 1
