"""`odradek replay sessions` on a real log: a session as it was run passes, a copy with a record missing does not."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import pytest
from support.cli import Cli
from support.session_world import (
    TOKENIZER,
    FolderEnvironment,
    MemoryJournal,
    ScriptedModel,
    runner,
    spec,
    template,
    turn,
)

from odradek.actors.session.clients import TOPIC, KafkaJournal
from odradek.actors.session.ports import Outgoing
from odradek.actors.session.runner import SessionRunner
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.sessions import ToolCompleted, TurnSampled
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord

pytestmark = pytest.mark.contract
T = template()
SCRIPT = [turn(T, ("read_file", {"path": "a.py"})), turn(T, done=True)]
FILES = {"a.py": "x = 1"}


@dataclass
class Written:
    config: KafkaConfig
    divergence: tuple[int, int]
    """Where the copy without a result goes on with the next turn."""


async def copied(log: EventLog, journal: KafkaJournal, session: str, records: list[SessionRecord]) -> tuple[int, int]:
    """The records of another session under this name, as its owner would have numbered them, but for the result."""
    epoch, seq, at = -1, 0, (-1, -1)
    for _, identifier, meta, body in records:
        if isinstance(body, ToolCompleted):
            continue
        if meta.seq >= 0:
            meta, seq = msgspec.structs.replace(meta, epoch=epoch, seq=seq), seq + 1
        (ref,) = await journal.append(session, [Outgoing(f"{session}:{identifier}", meta, body)])
        epoch = epoch if epoch >= 0 else ref.offset
        if isinstance(body, TurnSampled) and body.turn == 1:
            at = (ref.partition, ref.offset)
    return at


@pytest.fixture(scope="module")
def written(kafka_bootstrap: str) -> Iterator[Written]:
    made = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"t{uuid.uuid4().hex[:10]}")

    async def write() -> Written:
        await ensure_topics(made)
        async with EventLog(made) as log:
            memory = MemoryJournal()
            await runner(memory, ScriptedModel(SCRIPT), FolderEnvironment(), spec(FILES)).run()
            journal = KafkaJournal(log, "test")
            given = spec(FILES)
            whole = replace(given, opened=msgspec.structs.replace(given.opened, session_id="whole"))
            one: SessionRunner = runner(journal, ScriptedModel(SCRIPT), FolderEnvironment(), whole)  # type: ignore[arg-type]
            await one.run()
            return Written(made, await copied(log, journal, "torn", memory.history("s")))

    yield asyncio.run(write())


def test_a_divergence_is_named_by_its_place_and_what_was_expected(
    capsys: pytest.CaptureFixture[str], written: Written
) -> None:
    cli = Cli(capsys, written.config)
    answer = cli("replay", "sessions", "--tokenizer", TOKENIZER, "--json")
    assert (answer.code, answer.json["compared"]) == (1, 2)
    (found,) = answer.json["diverged"]
    assert (found["session_id"], found["topic"]) == ("torn", TOPIC)
    assert (found["partition"], found["offset"]) == written.divergence
    assert found["expected"] == "call 0.0 read_file" and found["found"].startswith("turn.sampled.v1 1")
    whole = cli("replay", "sessions", "--tokenizer", TOKENIZER, "--session", "whole")
    assert (whole.code, whole.out) == (0, "1/1 sessions as their state machine produces them\n")
    assert cli("replay", "sessions", "--tokenizer", TOKENIZER, "--session", "nobody").code == 2
