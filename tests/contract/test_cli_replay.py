"""`odradek replay` on a real log with no actor running."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet as parquet
import pytest
from support.cli import Cli
from support.small_log import LANE, SmallLog, write_small_log

from odradek.infra.cli.exports import noted
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module")
def config(kafka_bootstrap: str) -> Iterator[KafkaConfig]:
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")

    async def write() -> None:
        await ensure_topics(made)
        async with EventLog(made) as log:
            await write_small_log(log)

    asyncio.run(write())
    yield made


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], config: KafkaConfig) -> Cli:
    return Cli(capsys, config)


def test_every_batch_is_rebuilt_byte_for_byte(cli: Cli) -> None:
    answer = cli("replay", "rebuild", "--verify")
    assert (answer.code, answer.out) == (0, "1/1 byte-identical\n")
    (verdict,) = cli("replay", "verify", "--json").json["verdicts"]
    assert verdict["identical"] and verdict["reassembled"]
    assert verdict["leaves"] == dict.fromkeys(["a.0", "a.1", "b.0", "b.1"], "rebuilt")
    only = cli("replay", "rebuild", "--verify", "--batch", verdict["batch_id"], "--json")
    assert (only.code, only.json["identical"]) == (0, 1)


def test_the_digest_of_a_rebuilt_batch_is_the_same_each_time(cli: Cli) -> None:
    first, second = (cli("replay", "rebuild", "--json") for _ in range(2))
    assert first.code == 0 and first.json == second.json
    (batch,) = first.json
    assert (batch["members"], batch["tokens"], batch["trained_tokens"]) == (4, 52, 20)
    assert len(batch["sha256"]) == 64


def test_nothing_to_rebuild_is_no_success(cli: Cli) -> None:
    answer = cli("replay", "rebuild", "--verify", "--lane", "main-2")
    assert answer.code == 1 and "no batch of lane main-2" in answer.out
    unknown = cli("replay", "rebuild", "--verify", "--batch", "nothing")
    assert unknown.code == 2 and "no batch 'nothing'" in unknown.err


def test_the_same_filter_exports_the_same_bytes(cli: Cli, tmp_path: Path) -> None:
    for name in ("one", "two"):
        answer = cli("replay", "export", "--format", "jsonl", "--out", tmp_path / name, "--json")
        assert answer.code == 0 and answer.json["rows"] == 9
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    narrow = ("--task", "task-a", "--versions", "0-1", "--min-reward", "0.5", "--since", "2020-01-01", "--trained")
    answer = cli("replay", "export", "--format", "parquet", "--out", tmp_path / "three", *narrow)
    assert answer.code == 0 and answer.out.startswith("1 sessions, 13 tokens")
    (row,) = parquet.read_table(tmp_path / "three").to_pylist()
    assert row["session_id"] == "a.0"
    assert [part["kind"] for part in row["transcript"]] == ["message", "turn", "call", "result", "turn"]
    assert row["transcript"][1]["text"]


@pytest.mark.parametrize(
    "wrong",
    [
        ("--since", "yesterday"),
        ("--offsets", "3"),
        ("--offsets", "16:1-2"),
        ("--offsets", "1:9-2"),
        ("--versions", "a"),
        ("--label", "set"),
        ("--origin", "all"),
        ("--format", "csv"),
    ],
)
def test_a_condition_that_cannot_be_read_is_exit_code_2_and_no_file(
    cli: Cli, tmp_path: Path, wrong: tuple[str, str]
) -> None:
    form = () if wrong[0] == "--format" else ("--format", "jsonl")
    answer = cli("replay", "export", *form, "--out", tmp_path / "out", *wrong)
    assert answer.code == 2 and len(answer.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_existing_file_is_kept_unless_told_otherwise(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    assert cli("replay", "export", "--format", "jsonl", "--out", out).code == 2
    assert out.read_text() == "mine"
    assert cli("replay", "export", "--format", "jsonl", "--out", out, "--overwrite").code == 0
    assert out.read_text().startswith("{")
    assert cli("replay", "export", "--format", "jsonl", "--out", tmp_path / "no" / "out").code == 2


def test_a_file_that_could_not_be_made_is_none_that_an_erasure_looks_for(cli: Cli, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for form in ("jsonl", "parquet"):
        (tmp_path / f".never.{form}.partial").mkdir()  # what is to be written first can't be
        wanted = ("replay", "export", "--format", form, "--out")
        assert cli(*wanted, tmp_path / f"never.{form}", "--data", data).code == 3
        assert cli(*wanted, tmp_path / f"made.{form}", "--data", data).code == 0
    assert [Path(one.path).name for one in noted(data)] == ["made.jsonl", "made.parquet"]


def test_a_batch_that_is_not_what_was_recorded_is_named_by_its_leaf(cli: Cli, config: KafkaConfig) -> None:
    """Last in the module: it adds a forged batch to the log."""

    async def forge() -> None:
        async with EventLog(config) as log:
            (batch,) = [body async for body in bodies(log, "batches.v1") if isinstance(body, BatchAssembled)]
            members = [msgspec.structs.replace(batch.members[0], leaf="0" * 64), *batch.members[1:]]
            forged = msgspec.structs.replace(batch, batch_id="forged", ordinal=1, members=members)
            await SmallLog(log).append("batches.v1", LANE.lane, forged, "forged")

    asyncio.run(forge())
    answer = cli("replay", "rebuild", "--verify")
    assert answer.code == 1
    named, total = answer.out.splitlines()
    assert total == "1/2 byte-identical"
    assert named.startswith("batch 1 (forged): mismatch a.0")
    assert cli("replay", "verify", "--batch", "forged").code == 1
