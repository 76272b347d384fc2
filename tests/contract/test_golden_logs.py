"""Logs that older releases wrote are read, rebuilt, folded and exported as those releases did, on any instruction set.

Guarantee 5: rebuilt byte for byte. The logs are whole real runs: asynchronous, several turns, several weight versions
within a session, evaluations beside rollouts.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.cli import Cli
from support.golden_log import FOLDER, LANE, facts, machine
from support.log_copy import copied, load, write

from odradek.actors.environment.ns import NsDriver
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.reward.grader import GRADER, VERSION
from odradek.actors.reward.graders import grader_of
from odradek.actors.reward.rescore import rescore
from odradek.sandbox_images.store import ImageStore
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.config import KafkaConfig
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import TurnSampled
from odradek.streams.log import EventLog
from odradek.streams.replay.reseal import seals_from
from odradek.streams.replay.select import bodies

pytestmark = pytest.mark.contract

TESTS = Path(__file__).parents[1]
RELEASES = sorted(path.name.removesuffix(".msgpack.xz") for path in FOLDER.glob("*.msgpack.xz"))
CHILD_S = 240
"""Seconds for the other process: it imports torch on a busy machine."""


def older_host() -> dict[str, str]:
    """What makes torch, its BLAS, numpy and the C library take the code paths of a processor without AVX2 and FMA."""
    return {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": " ".join(machine()["numpy"]),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX512F,-FMA,-FMA4",
    }


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, kafka_bootstrap: str) -> tuple[str, KafkaConfig]:
    """A release's log on a real broker."""
    config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")
    asyncio.run(write(config, load(FOLDER / f"{request.param}.msgpack.xz")))
    return request.param, config


def told(name: str) -> Any:
    """What the release itself made of its log."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_there_is_a_log_of_an_older_release() -> None:
    assert "064ab03" in RELEASES


async def test_the_log_is_on_the_broker_offset_for_offset(release: tuple[str, KafkaConfig]) -> None:
    name, config = release
    async with EventLog(config) as log:
        found = await copied(log)
    compacted = ("weights.current.v1", "replicas.v1")
    kept = sorted(load(FOLDER / f"{name}.msgpack.xz"), key=lambda one: (one.topic, one.partition, one.offset))
    found.sort(key=lambda one: (one.topic, one.partition, one.offset))
    assert [one for one in found if one.topic not in compacted] == [one for one in kept if one.topic not in compacted]


async def test_a_log_written_by_an_older_release_replays_as_it_did_then(release: tuple[str, KafkaConfig]) -> None:
    """Batches byte for byte, sessions to the same state and workspace, the training set to the same tokens."""
    name, config = release
    async with EventLog(config) as log:
        found = await facts(log)
        turns = [body async for body in bodies(log, "sessions.v1") if isinstance(body, TurnSampled)]
    assert found == told(name)
    versions = [session["versions"] for session in found["sessions"].values()]
    assert sum(len(one) > 1 for one in versions) > 20, "sessions that went on under newer weights"
    assert sum(len(turn.spans) > 1 for turn in turns) > 0, "turns that were sampled under two versions"
    assert sum(session["turns"] > 1 for session in found["sessions"].values()) > 80


def test_the_commands_read_it(release: tuple[str, KafkaConfig], capsys: pytest.CaptureFixture[str]) -> None:
    name, config = release
    cli = Cli(capsys, config)
    verified = cli("replay", "verify", "--lane", LANE)
    assert (verified.code, verified.out) == (0, f"{told(name)['rebuilt']}\n")
    batches = cli("batch", "list", "--json").json
    assert sorted(one["batch_id"] for one in batches) == sorted(told(name)["batches"])
    newest = batches[-1]["version"]
    assert cli("weights", "explain", newest, "--json").json["batch_id"] == batches[-1]["batch_id"]
    member = cli("batch", "explain", batches[0]["batch_id"], "--json").json["groups"][0]["members"][0]["session_id"]
    seen = cli("batch", "seen", "--session", member, "--json").json
    assert [one["version"] for one in seen["versions"]] == list(range(1, newest + 1))


def test_another_instruction_set_rebuilds_the_same_bytes(release: tuple[str, KafkaConfig]) -> None:
    """In a process whose libraries are held to an older processor's code paths: another host, as `numerics_id` says."""
    name, config = release
    command = [sys.executable, "-m", "support.golden_log", "facts", config.bootstrap, config.prefix]
    done = subprocess.run(
        command, cwd=TESTS, env=os.environ | older_host(), capture_output=True, text=True, timeout=CHILD_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    child = json.loads(done.stdout)
    assert child["machine"]["torch"] == "DEFAULT" and child["machine"]["numpy"] == []
    assert child["machine"]["numerics_id"] != machine()["numerics_id"]
    assert child["facts"] == told(name)


async def test_hidden_tests_run_again_over_an_older_log_say_what_they_said(
    release: tuple[str, KafkaConfig], tmp_path: Path
) -> None:
    """The workspace that is judged comes from the log alone (image, the task's files, the session's deltas), in a
    sandbox of today's."""
    _, config = release
    images = ImageStore(tmp_path / "images")
    driver = NsDriver(tmp_path / "sandboxes", images)
    await driver.start()
    try:
        factory = SandboxFactory(driver, images, BlobStore(MemoryStore()))
        async with EventLog(config) as log:
            seals = (await seals_from(log, LANE, 0))[:3]
            done = await rescore(log, grader_of(f"{GRADER}@{VERSION}"), seals, "again", factory=factory, at_once=2)
            pairs = [await components(log, ref) for ref in done.revised.values()]
        left = await driver.list()
    finally:
        await driver.close()
    assert len(pairs) == 12 and done.unfit == {} and left == ()
    assert [again for again, _ in pairs] == [stood for _, stood in pairs]
    assert {stood["solved"] for _, stood in pairs} == {0.0, 1.0}, "both outcomes are among them"


async def components(log: EventLog, ref: RecordRef) -> tuple[dict[str, float], dict[str, float]]:
    """What a revised reward says, and the verdict that it revises."""
    revised = (await log.read_ref(ref)).event.body
    stood = (await log.read_ref(revised.revises)).event.body
    return revised.components, {name: stood.components[name] for name in revised.components}
