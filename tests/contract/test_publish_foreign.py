"""Any Kafka client publishes a task: the README's own lines, run in a process that knows nothing of ours.

The snippet is the fenced block after `<!-- foreign-client -->` in README.md (until it is there, that of
tests/support/foreign_client_snippet.md).
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from odradek.actors.controller.core import Controller
from odradek.actors.tasks.refusal import refusal
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
MARKER = "<!-- foreign-client -->"
BLOCK = re.compile(re.escape(MARKER) + r"\s*```python\n(.*?)```", re.DOTALL)
WITHOUT_OURS = "import sys; sys.modules['odradek'] = None\n"
"""Makes any import of ours an error in that process."""


def snippet() -> str:
    """The documented lines."""
    for path in (ROOT / "README.md", ROOT / "tests" / "support" / "foreign_client_snippet.md"):
        text = path.read_text() if path.exists() else ""
        if MARKER in text:
            found = BLOCK.search(text)
            assert found is not None, f"{path}: no fenced python block follows {MARKER}"
            return found[1]
    raise AssertionError(f"no {MARKER} anywhere")


def run_alone(code: str, bootstrap: str) -> subprocess.CompletedProcess[str]:
    """The lines in a process of their own, from which ours cannot be imported."""
    command = [sys.executable, "-I", "-c", WITHOUT_OURS + code, bootstrap]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_documented_client_is_five_lines_beside_its_task() -> None:
    lines = [line for line in snippet().splitlines() if line.strip() and not line.startswith(("task", " ", "}"))]
    assert len(lines) <= 5


async def records(config: KafkaConfig) -> list[Record]:
    async with EventLog(config) as log:
        return [
            record
            for number in await log.partitions("tasks.v1")
            async for record in log.read("tasks.v1", number, await log.beginning("tasks.v1", number))
        ]


async def test_the_documented_client_publishes_a_task_that_our_reader_takes(fresh_config: KafkaConfig) -> None:
    code = snippet().replace('"tasks.v1"', f'"{fresh_config.name("tasks.v1")}"')
    assert fresh_config.name("tasks.v1") in code
    for _ in range(2):
        done = await asyncio.to_thread(run_alone, code, fresh_config.bootstrap)
        assert (done.returncode, done.stderr) == (0, "")
    found = await records(fresh_config)
    assert [record.event.type for record in found] == ["task.published.v1"] * 2
    body = found[0].event.body
    assert isinstance(body, TaskPublished)
    assert refusal(body) is None
    assert (body.task_id, body.purpose, found[0].event.meta.tenant) == ("mend-add", "rl", "default")
    core = Controller(LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=8, max_staleness=2))
    for record in found:
        core.on_task(record.ref, record.event.body)
    assert len(core.queue) == 1  # the same task id twice is one task


async def test_a_tenants_word_never_counts_its_topic_does(fresh_config: KafkaConfig) -> None:
    await ensure_topics(fresh_config, tenants=["acme"])
    code = snippet().replace('"tasks.v1"', f'"{fresh_config.name("tasks.v1.acme")}"')
    code = code.replace('json.dumps({"body": task})', 'json.dumps({"body": task, "meta": {"tenant": "other"}})')
    assert '"other"' in code
    assert (await asyncio.to_thread(run_alone, code, fresh_config.bootstrap)).returncode == 0
    async with EventLog(fresh_config) as log:
        found = [r for number in range(3) async for r in log.read("tasks.v1.acme", number, 0)]
    assert [record.event.meta.tenant for record in found] == ["acme"]
