"""The environment actor on real sandboxes: one session has one sandbox, its newest owner's, whoever asked when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.crash.host import held
from support.waiting import eventually

from odradek.actors.environment.actor import EnvironmentActor
from odradek.actors.environment.errors import SandboxSucceededError
from odradek.actors.environment.protocol import Sandbox
from odradek.actors.environment.start import SandboxFactory
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import EnvironmentInfo, WorkspaceStart
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured

pytestmark = pytest.mark.contract
START = WorkspaceStart("demo", {"a.py": b"x"})


@pytest.fixture
async def actor(s3_config: dict[str, str], tmp_path: Path) -> AsyncIterator[EnvironmentActor]:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({name: s3_config[name] for name in ("access_key", "secret_key")}))
    address = ObjectStoreAddress(endpoint=s3_config["endpoint"], bucket=s3_config["bucket"], credentials_file=str(keys))
    lane = LaneConfigured(lane="main-0", policy="p", groups_per_batch=1, attempts=2, max_staleness=1)
    deployment = Deployment(
        kafka=KafkaConfig("nowhere:1"), store=address, lane=lane, data_dir=str(tmp_path), tokenizer_file="",
        warm_start_dir="",
    )  # fmt: skip
    made = await asyncio.to_thread(EnvironmentActor, deployment, "environment-0")
    yield made
    await made.shut_down()
    await asyncio.to_thread(made._loop.stop)
    assert held(tmp_path) == []


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The first sandbox that is made is held back, as on a busy host, until the returned function is called."""
    made, waiting = SandboxFactory.open, asyncio.Event()
    first: list[bool] = []

    async def held_back(self: SandboxFactory, *given: object, **named: object) -> Sandbox:
        sandbox = await made(self, *given, **named)  # type: ignore[arg-type]
        if not first:
            first.append(True)
            while not waiting.is_set():  # noqa: ASYNC110 - set on another loop
                await asyncio.sleep(0.02)
        return sandbox

    monkeypatch.setattr(SandboxFactory, "open", held_back)
    return waiting.set


async def opened_later(
    actor: EnvironmentActor, tmp_path: Path, epochs: tuple[int, int], release: Callable[[], None]
) -> list[EnvironmentInfo | BaseException]:
    """Two requests for one session: the first one's sandbox is there last."""
    first = asyncio.create_task(actor.open("s", epochs[0], START, []))
    assert await eventually(lambda: bool(held(tmp_path)), "the first one's sandbox is there")
    second = await actor.open("s", epochs[1], START, [])
    release()
    (one,) = await asyncio.gather(first, return_exceptions=True)
    return [one, second]


async def test_a_former_owner_whose_sandbox_comes_late_gets_none(
    actor: EnvironmentActor, slow: Callable[[], None], tmp_path: Path
) -> None:
    """Else it would stand in the place of its successor's, which nobody would ever end."""
    former, owner = await opened_later(actor, tmp_path, (1, 2), slow)
    assert isinstance(former, SandboxSucceededError) and isinstance(owner, EnvironmentInfo)
    (left,) = held(tmp_path)
    assert left.endswith(owner.sandbox_id)
    assert await actor.run_calls("s", 2, [], 1.0) == []


async def test_an_owner_that_asked_twice_has_one_sandbox(
    actor: EnvironmentActor, slow: Callable[[], None], tmp_path: Path
) -> None:
    await opened_later(actor, tmp_path, (1, 1), slow)
    assert len(held(tmp_path)) == 1
    await actor.close("s", 1)
    assert held(tmp_path) == []
