"""The environment actor over a real sandbox: what it promises beyond the tools and the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from odradek.actors.environment.actor import TOO_DEEP, EnvironmentActor
from odradek.actors.environment.errors import SandboxGoneError
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import Call, WorkspaceStart
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured

pytestmark = pytest.mark.contract

DEEP = 'i=0; while [ "$i" -lt 2500 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done'


async def test_a_change_too_deep_to_record_is_undone_and_the_model_is_told(tmp_path: Path) -> None:
    """It is the call's doing: were it taken for a fault of ours, an agent could nest folders to escape its grade."""
    deployment = Deployment(
        kafka=KafkaConfig("127.0.0.1:1"),
        store=ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none"),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir=str(tmp_path),
        tokenizer_file="",
        warm_start_dir="",
    )
    actor = EnvironmentActor(deployment, "environment-0")
    try:
        start = WorkspaceStart("demo", {"a.txt": b"x"})
        await actor.open("s", 1, start, [])
        (outcome,) = await actor.run_calls("s", 1, [Call("0.0", "run_terminal", {"command": DEEP})], 60.0)
        assert (outcome.text, outcome.is_error, outcome.delta) == (TOO_DEEP, True, None)
        with pytest.raises(SandboxGoneError):
            await actor.run_calls("s", 1, [Call("1.0", "list_dir", {})], 60.0)
        await actor.open("s", 1, start, [])
        (listed,) = await actor.run_calls("s", 1, [Call("1.0", "list_dir", {})], 60.0)
        assert listed.text == "a.txt"
    finally:
        await actor.shut_down()
