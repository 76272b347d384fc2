"""A person's files in a sandbox: the same tree as anybody's, and nothing of them on the host when it is gone."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from odradek.actors.environment.actor import EnvironmentActor
from odradek.actors.environment.logged import INLINE_BYTES
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import Call, CallOutcome, WorkspaceStart
from odradek.infra.stack.s3 import s3_client
from odradek.streams.config import KafkaConfig, KeyStoreAddress
from odradek.streams.events.groups import LaneConfigured

pytestmark = pytest.mark.contract

MARKER = f"marker-{uuid.uuid4().hex}"
FILES = {"src/shop/total.py": f"# {MARKER}\n".encode(), "README": b"x\n", "empty/deep/er/f": b""}
OURS = FILES | {"src/shop/total.py": b"# anybody's\n"}
LISTING = "find . -printf '%y %m %u %p\\n' | sort"
SETUP = ["chmod 755 ./README"]


def deployment(data: Path, s3: dict[str, str], credentials: Path) -> Deployment:
    return Deployment(
        kafka=KafkaConfig("127.0.0.1:1"),
        store=ObjectStoreAddress(endpoint=s3["endpoint"], bucket=s3["bucket"], credentials_file=str(credentials)),
        keys=KeyStoreAddress(folder=str(data / "keys")),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir=str(data),
        tokenizer_file="",
        warm_start_dir="",
    )


def holding(folder: Path, text: str) -> list[str]:
    """Files below a folder whose bytes contain the text."""
    return [
        str(path) for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes()
    ]  # fmt: skip


async def run(actor: EnvironmentActor, session: str, command: str) -> CallOutcome:
    (outcome,) = await actor.run_calls(session, 1, [Call("0.0", "run_terminal", {"command": command})], 60.0)
    return outcome


async def test_a_persons_files_are_in_their_sandbox_alone(
    tmp_path: Path, s3_config: dict[str, str], s3_access: Any
) -> None:
    """Guarantee 9: what a session was started on outlives it on the log only, encrypted; and so do large results."""
    credentials = tmp_path / "credentials.json"
    credentials.write_bytes(msgspec.json.encode({name: s3_config[name] for name in ("access_key", "secret_key")}))
    data, subject = tmp_path / "data", f"person-{uuid.uuid4().hex[:8]}"
    actor = EnvironmentActor(deployment(data, s3_config, credentials), "environment-0")
    try:
        await actor.open("theirs", 1, WorkspaceStart("demo", FILES, SETUP, subject=subject, production=True), [])
        await actor.open("ours", 1, WorkspaceStart("demo", OURS, SETUP), [])
        theirs, ours = await run(actor, "theirs", LISTING), await run(actor, "ours", LISTING)
        assert theirs.text == ours.text and "755 agent ./README" in ours.text, "the same tree either way"
        assert theirs.delta is None, "starting files are no change of a call's"
        assert holding(data / "images", "anybody"), "a task's files are a layer, for the next attempt"
        command = f"(cat src/shop/total.py; head -c {INLINE_BYTES + 1} /dev/zero) > big"
        (changed,) = (await run(actor, "theirs", command)).delta.changes  # type: ignore[union-attr]
        assert changed.ref is not None and changed.ref.subject == subject
        stored = s3_client(s3_access).get_object(Bucket=s3_config["bucket"], Key=changed.ref.key)["Body"].read()
        assert MARKER.encode() not in stored and hashlib.sha256(stored).hexdigest() == changed.ref.sha256
        assert changed.ref.key.startswith(f"blobs/{subject}/")
        await actor.close("theirs", 1)
        assert holding(data, MARKER) == []
    finally:
        await actor.shut_down()
        actor._loop.stop()
