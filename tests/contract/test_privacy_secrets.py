"""A command prints secrets: none reaches the log, a trace, a dead letter or a person's screen; look-alikes stay.

benchflow-ai/benchflow #537 and OpenHands/software-agent-sdk #2629. The session is whole: the real runner, log, sandbox,
traces, queue and commands; the model alone is scripted. No secret stands in its command: they are put together inside.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cli import Cli
from support.collector import Collector, attributes, collecting
from support.lane_world import until
from support.session_world import ScriptedModel, template, turn

from odradek.actors.environment.actor import EnvironmentActor
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.clients import KafkaJournal
from odradek.actors.session.ports import Call, CallOutcome, EnvironmentInfo, WorkspaceStart
from odradek.actors.session.runner import SessionRunner, SessionSpec
from odradek.actors.telemetry.tracing import Tracing
from odradek.actors.tools.redact import redact
from odradek.actors.tools.registry import TOOLS
from odradek.streams.config import KafkaConfig
from odradek.streams.consumers import GroupConsumer, Retry
from odradek.streams.dlq import DeadLetters
from odradek.streams.envelope import Record
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.sessions import SessionOpened, ToolCompleted, WorkspaceDelta
from odradek.streams.events.tasks import Budget
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract

SECRETS = {
    "GH": ("ghp_", "abcdefghijABCDEFGHIJ0123456789abcdef"),
    "ACME_API_KEY": ("zq_live_", "9f8a7s6d5f4g3h2j1k"),
    "ACME": ("xq-Lk92jdKx83", "JsPq02Lm4nVb"),
    "DB_PASSWORD": ("hun", "ter2"),
}
"""Made up, four shapes: known, by name, by look alone, a word under a telling name."""
KEPT = ["COMMIT=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b", "MODULE=my_package.some_module_name.another2"]
COMMAND = (
    "; ".join(f"a='{first}'; b='{rest}'; export {name}=\"$a$b\"" for name, (first, rest) in SECRETS.items())
    + f"; unset a b; export {' '.join(KEPT)}; env"
)
FILE = "start-payload-" + "q7Rk2ZpXw93LmTt8"
"""In the workspace from the start: what a sandbox is started with is nobody's log line."""


@dataclass
class Local:
    """The environment actor, in this process."""

    actor: EnvironmentActor

    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        return await self.actor.open(session_id, epoch, start, deltas)

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        return await self.actor.run_calls(session_id, epoch, calls, tool_seconds)

    async def close(self, session_id: str, epoch: int) -> None:
        await self.actor.close(session_id, epoch)


async def run_session(log: EventLog, config: KafkaConfig, data: Path, endpoint: str) -> None:
    deployment = Deployment(
        kafka=config,
        store=ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none"),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir=str(data),
        tokenizer_file="",
        warm_start_dir="",
    )
    tracing = Tracing.of(endpoint, "session-0", redact)
    actor = EnvironmentActor(deployment, "environment-0")
    text = template()
    # Its arguments are cut into tokens, and so is the command: long for the policy's context, not for this budget.
    model = ScriptedModel([turn(text, ("run_terminal", {"command": COMMAND})), turn(text, done=True)])
    opened = SessionOpened(
        session_id="s", policy="demo", group_id="g", budget=Budget(max_context_tokens=8000, tool_seconds=60.0)
    )
    spec = SessionSpec(opened, "print the environment", WorkspaceStart("demo", {"notes.txt": FILE.encode()}))
    try:
        await SessionRunner(
            spec,
            template=text,
            effects={tool.name: tool.effect for tool in TOOLS.values()},
            journal=KafkaJournal(log, "session-0", tracing.traceparent),
            engine=model,
            environment=Local(actor),
            observe=tracing.observe,
        ).run()
    finally:
        await actor.shut_down()
        actor._loop.stop()
        tracing.close()


async def dead_letter(log: EventLog) -> int:
    """A consumer that cannot handle the result, and whose error quotes it."""

    async def handler(record: Record) -> None:
        if isinstance(record.event.body, ToolCompleted):
            raise ValueError(f"cannot handle {record.event.body.text}")

    consumer = GroupConsumer(log, "quoting", ["sessions.v1"], handler, retry=Retry(attempts=1))
    task, letters = asyncio.create_task(consumer.run()), DeadLetters(log)

    async def arrived() -> bool:
        return bool(await letters.letters("quoting"))

    try:
        await until(task, arrived)
    finally:
        consumer.stop()
        await task
    return (await letters.letters("quoting"))[0].offset


def no_secret_in(shown: str, where: str) -> None:
    """Whole secrets: their parts stand in the model's own command."""
    for first, rest in SECRETS.values():
        assert first + rest not in shown, where


async def test_case_benchflow_537_no_printed_secret_reaches_log_trace_dead_letter_or_log_line(
    fresh_config: KafkaConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, "odradek")
    collector: Collector
    with collecting() as collector:
        async with EventLog(fresh_config) as log:
            await run_session(log, fresh_config, tmp_path, collector.endpoint)
            letter = await dead_letter(log)
            records = [record async for record in log.read_key("sessions.v1", "s", start=0)]
            queued = await DeadLetters(log).letters("quoting")
    (result,) = [r.event.body for r in records if isinstance(r.event.body, ToolCompleted)]
    assert result.redactions == len(SECRETS) and not result.is_error, result.text
    for name in SECRETS:
        assert f"{name}=[redacted:" in result.text, "the redaction is visible, to the model too"
    for kept in KEPT:
        assert kept in result.text
    for _, rest in SECRETS.values():
        assert rest not in result.text, "a part of it is shown"
    for record in records:
        no_secret_in(repr(record.event.body), "log")
        no_secret_in((record.value or b"").decode("latin-1"), "stored record")
    assert "cannot handle" in queued[0].error, "the letter quotes nothing: the test shows nothing"
    for one in queued:
        no_secret_in(f"{one.error}{(one.value or b'').decode('latin-1')}", "dead letter")
    assert collector.spans, "nothing was traced: the test shows nothing"
    for span in collector.spans:
        no_secret_in(repr(attributes(span)), "trace")
    for line in caplog.text.splitlines():
        no_secret_in(line, "log line")
        assert FILE not in line, "what the sandbox was started with is in a log line"

    def shown(*arguments: object) -> str:
        answer = Cli(capsys, fresh_config)(*arguments)
        assert answer.code == 0, answer.err
        return answer.out + answer.err

    said = await asyncio.to_thread(shown, "session", "show", "s", "--json")
    assert "[redacted:" in said
    no_secret_in(said, "session show")
    no_secret_in(await asyncio.to_thread(shown, "dlq", "show", letter), "dlq show")
    no_secret_in(await asyncio.to_thread(shown, "dlq", "list"), "dlq list")
