"""`odradek subject erase` and what other commands say of an erased subject, on real services with no actor running."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.assembly_world import turn
from support.cli import Cli, Terminal
from support.lane_world import LaneWorld
from support.training_world import TrainingWorld

from odradek.streams.admin import ensure_topics
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.events.sessions import TurnSampled
from odradek.streams.log import EventLog
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing

pytestmark = pytest.mark.contract
LANE = "main-0"
MARKER = f"marker-{uuid.uuid4().hex}"


@pytest.fixture
def subject() -> str:
    """One of its own: the bucket is shared with other tests."""
    return f"ann/{uuid.uuid4().hex[:8]}@example.org"


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    kafka_bootstrap: str,
    s3_config: dict[str, str],
    tmp_path: Path,
    subject: str,
) -> Cli:
    """A deployment by its addresses, with a log that holds the subject's sessions in a batch, and objects of theirs."""
    config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
    credentials = tmp_path / "credentials.json"
    credentials.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    monkeypatch.setenv("ODRADEK_DATA", str(tmp_path / "data"))
    for name, value in {
        "ENDPOINT": s3_config["endpoint"], "BUCKET": s3_config["bucket"], "CREDENTIALS_FILE": str(credentials)
    }.items():  # fmt: skip
        monkeypatch.setenv(f"ODRADEK_S3__{name}", value)

    async def write() -> None:
        await ensure_topics(config)
        store, ring = S3Store(S3Config(**s3_config)), KeyRing(KeyFiles(tmp_path / "data" / "keys"))
        async with EventLog(config, keys=ring) as log:
            lane = LaneWorld(log, {"groups_per_batch": 1}, LANE)
            await lane.configure()
            await lane.grant(subject)
            said: list[TurnSampled] = [turn(0, 0, [1, 2], [5, 6, 7])]
            world: Any = TrainingWorld(lane, store, tmp_path, "x")
            await world.assemble(1, turns=said, origin="production", subject=subject)
            await BlobStore(store, keys=ring).put(MARKER.encode(), subject=subject)
        store.close()

    asyncio.run(write())
    return Cli(capsys, config)


def test_erase_reports_store_by_store_and_what_follows_agrees(
    cli: Cli, subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    exported = cli("replay", "export", "--format", "jsonl", "--out", rows, "--json")
    assert exported.json["rows"] == 2 and len(rows.read_text().splitlines()) == 2
    assert cli("replay", "rebuild", "--verify").out == "1/1 byte-identical\n"

    done = cli("subject", "erase", subject, "--yes", "--json")
    assert done.code == 0, done.err
    report = done.json
    assert report["done"] is True and report["sessions"] == 2 and report["exclusion"]["broken"] == []
    assert {one["store"]: one["state"] for one in report["stores"]} == {
        "key": "deleted", "sessions.v1": "unreadable", "rewards.v1": "none", "feedback.v1": "none", "tasks.v1": "none",
        "subjects.v1": "none", "dlq.v1": "none", "objects": "deleted", "tables": "none", "exports": "deleted",
    }  # fmt: skip
    assert [len(batch["sessions"]) for batch in report["batches"]] == [2] and report["versions"] == []
    assert rows.read_text() == ""

    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    text = cli("subject", "erase", subject)
    assert "can't be read by anybody after that" in text.err, "asked once more: it may be run again"
    assert text.code == 0 and text.out.lstrip().startswith(f"{subject}: erased (asked for at subjects.v1/0@")
    assert "pending      batch" in text.out and "2 sessions, in 1 batches" in text.out
    verified = cli("replay", "rebuild", "--verify")
    assert verified.code == 0, "an erased member is named and is no fault"
    assert verified.out.endswith("0/1 byte-identical; 1/1 but for 2 erased members\n")
    assert all(f"erased {member}" in verified.out for member in report["batches"][0]["sessions"])
    listed = cli("session", "list", "--json").json
    assert [(one["origin"], one["end"], one["turns"], one["sampled_tokens"]) for one in listed] == [
        ("production", "done", 1, 3)
    ] * 2
    shown = cli("session", "show", listed[0]["session_id"])
    assert shown.code == 0 and "[withheld]" in shown.out
    assert cli("replay", "export", "--format", "jsonl", "--out", rows, "--overwrite", "--json").json["rows"] == 0
    granted = cli("subject", "consent", "grant", subject)
    assert granted.code == 1 and "was erased, for ever" in granted.err
    again = cli("subject", "consent", "withdraw", subject, "--reason", "late")
    assert again.code == 3 and "was erased: its key is destroyed" in again.err, "one line, no traceback"


def test_what_cannot_be_looked_at_is_said_and_ends_with_exit_code_1(cli: Cli, subject: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    assert cli("replay", "export", "--format", "jsonl", "--out", rows).code == 0
    moved = rows.rename(tmp_path / "elsewhere.jsonl")
    refused = cli("subject", "erase", subject, "--yes")
    assert refused.code == 1 and "NOT all done" in refused.out
    assert f"exports      unreachable {rows}: not where it was written" in refused.out
    moved.unlink()
    assert cli("subject", "erase", subject, "--yes", "--gone", rows).code == 0
    assert cli("subject", "erase", " ").code == 2


def test_a_key_is_destroyed_even_while_the_object_store_is_down(
    cli: Cli, subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODRADEK_S3__ENDPOINT", "http://127.0.0.1:9")
    refused = cli("subject", "erase", subject, "--yes", "--json")
    assert refused.code == 1
    states = {one["store"]: one["state"] for one in refused.json["stores"]}
    assert (states["key"], states["sessions.v1"], states["objects"]) == ("deleted", "unreadable", "unreachable")
