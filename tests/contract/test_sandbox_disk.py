"""A command can't fill the host's disk: its sandbox is ended with the reason, the others live on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contract.sandbox_contract import demo_spec, sandbox_images

from odradek.actors.environment.errors import SandboxGoneError
from odradek.actors.environment.ns import disk
from odradek.actors.environment.ns.admission import NsConfig
from odradek.actors.environment.ns.driver import NsDriver
from odradek.actors.environment.protocol import ExecRequest, SandboxSpec
from odradek.sandbox_images.store import ImageStore

__all__ = ["demo_spec", "sandbox_images"]

pytestmark = pytest.mark.contract

ALLOWED = 64 << 20


@pytest.fixture
async def driver(
    tmp_path: Path, sandbox_images: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NsDriver]:
    monkeypatch.setattr(disk, "STEP_BYTES", 8 << 20)
    driver = NsDriver(tmp_path / "state", sandbox_images, NsConfig(max_disk_bytes=ALLOWED))
    await driver.start()
    yield driver
    await driver.close()
    assert list((tmp_path / "state").iterdir()) == []


async def test_a_command_that_fills_the_disk_ends_its_sandbox_and_no_other(
    driver: NsDriver, demo_spec: SandboxSpec
) -> None:
    hostile, honest = await driver.create(demo_spec), await driver.create(demo_spec)
    fill = "i=0; while :; do head -c 4000000 /dev/zero > f$i; i=$((i+1)); sleep 0.02; done"
    with pytest.raises(SandboxGoneError, match="at most 64 MB are allowed"):
        await hostile.exec(ExecRequest(shell=fill, timeout_s=60))
    assert (await honest.exec(ExecRequest(shell="echo here"))).stdout == "here\n"
    assert driver.live() == (honest,)
