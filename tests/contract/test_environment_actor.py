"""The environment actor over a real sandbox: what it promises beyond the tools and the driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from odradek.actors.environment.actor import TOO_DEEP, EnvironmentActor
from odradek.actors.environment.errors import SandboxGoneError
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import Call, WorkspaceStart
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured

pytestmark = pytest.mark.contract

START = WorkspaceStart("demo", {"a.txt": b"x"})
DEEP = 'i=0; while [ "$i" -lt 2500 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done'


@pytest.fixture
async def actor(tmp_path: Path) -> AsyncIterator[EnvironmentActor]:
    deployment = Deployment(
        kafka=KafkaConfig("127.0.0.1:1"),
        store=ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none"),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir=str(tmp_path),
        tokenizer_file="",
        warm_start_dir="",
    )
    made = EnvironmentActor(deployment, "environment-0")
    try:
        await made.open("s", 1, START, [])
        yield made
    finally:
        await made.shut_down()


async def test_a_change_too_deep_to_record_is_undone_and_the_model_is_told(actor: EnvironmentActor) -> None:
    """It is the call's doing: were it taken for a fault of ours, an agent could nest folders to escape its grade."""
    (outcome,) = await actor.run_calls("s", 1, [Call("0.0", "run_terminal", {"command": DEEP})], 60.0)
    assert (outcome.text, outcome.is_error, outcome.delta) == (TOO_DEEP, True, None)
    with pytest.raises(SandboxGoneError):
        await actor.run_calls("s", 1, [Call("1.0", "list_dir", {})], 60.0)
    await actor.open("s", 1, START, [])
    (listed,) = await actor.run_calls("s", 1, [Call("1.0", "list_dir", {})], 60.0)
    assert listed.text == "a.txt"


async def test_what_no_delta_can_carry_is_named_on_the_log_once(actor: EnvironmentActor) -> None:
    """A rebuilt workspace lacks it, and nobody else would say so."""

    async def ran(call: str, command: str) -> tuple[list[str], list[str]]:
        (outcome,) = await actor.run_calls("s", 1, [Call(call, "run_terminal", {"command": command})], 60.0)
        assert outcome.delta is not None, outcome.text
        return [change.path for change in outcome.delta.changes], outcome.delta.skipped

    fifo = "python3 -c 'import os; os.mkfifo(\"pipe\")'; echo y > a.txt"
    changed, skipped = await ran("0.0", fifo)
    assert changed == ["a.txt"] and len(skipped) == 1 and "pipe" in skipped[0]
    assert await ran("1.0", "echo z > a.txt") == (["a.txt"], [])
