"""The notary's fault points by kill -9 of a real process: an open transaction that nobody aborts, a round not kept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest
from support.lane_world import LaneWorld

from odradek.streams import faults
from odradek.streams.audit.keys import load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.audit.verify import AuditReport, verify
from odradek.streams.blobs import S3Config
from odradek.streams.config import KafkaConfig
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

POINTS = [point for point in faults.POINTS if point.startswith("notary.")]


@pytest.mark.parametrize("point", POINTS)
async def test_a_notary_killed_by_the_system_leaves_no_gap_and_every_round_is_kept(
    fresh_config: KafkaConfig, tmp_path: Path, s3_config: dict[str, str], point: str
) -> None:
    settings = AuditSettings(
        name=f"killed-{uuid.uuid4().hex[:8]}", interval_records=4, interval_s=0.1, key_file=str(tmp_path / "key")
    )
    async with EventLog(fresh_config) as log:

        async def verified() -> AuditReport:
            vault = Vault(S3Config(**s3_config), settings)
            await vault.open()
            return await verify(log, vault, settings.name, {load_or_make_key(tmp_path / "key").public})

        lane = LaneWorld(log)
        await lane.configure()
        await lane.group()
        given = {
            "role": "notary",
            "point": point,
            "nth": 1,
            "kafka": msgspec.to_builtins(fresh_config),
            "lane": msgspec.to_builtins(lane.configuration()),
            "audit": msgspec.to_builtins(settings),
            "s3": s3_config,
        }
        child = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "support.crash_child"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
            input=msgspec.json.encode(given),
            capture_output=True,
            timeout=200,
            check=False,
        )
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()[-2000:]
        began = await verified()
        rounds = int(point == "notary.after_commit")
        assert (began.rounds, began.not_kept) == (rounds, rounds), "it died before the round was kept"
        await lane.group()
        vault = Vault(S3Config(**s3_config), settings)
        anchored = await Notary(log, vault, load_or_make_key(tmp_path / "key"), settings).once()
        report = await verified()
        assert (report.findings, report.not_anchored, report.not_kept) == ([], 0, 0)
        assert report.verified == anchored + began.verified
