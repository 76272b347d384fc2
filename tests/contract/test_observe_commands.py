"""The commands that only look, against a real broker: what they say is what was written, with every actor stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from support.collector import collecting
from support.folded import folded
from support.run_log import RunLog, small_run

from odradek.actors.telemetry.spans import SessionSpans, SpanMaker
from odradek.infra.cli.main import run
from odradek.infra.observe.follow import RunFollower, SessionFollower
from odradek.infra.observe.traces import later_spans, newest_sessions, session_traces
from odradek.streams.config import KafkaConfig
from odradek.streams.log import EventLog
from odradek.streams.testing import fresh_config as fresh_config

pytestmark = pytest.mark.contract


@pytest.fixture
async def written(fresh_config: KafkaConfig) -> RunLog:
    log = small_run()
    async with EventLog(fresh_config) as event_log:
        await log.write(event_log)
    return log


@pytest.fixture
def asked(
    written: RunLog, fresh_config: KafkaConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Any:  # fmt: skip
    monkeypatch.setenv("ODRADEK_KAFKA__BOOTSTRAP", fresh_config.bootstrap)
    monkeypatch.setenv("ODRADEK_KAFKA__PREFIX", fresh_config.prefix)
    monkeypatch.setenv("ODRADEK_DATA", str(tmp_path))

    def ask(*arguments: str, code: int = 0) -> str:
        assert run(list(arguments)) == code
        return capsys.readouterr().out

    return ask


async def test_a_follower_sees_what_a_plain_fold_of_the_log_sees(written: RunLog, fresh_config: KafkaConfig) -> None:
    fold, book = folded(written)
    async with EventLog(fresh_config) as event_log:
        follower, sessions = RunFollower(event_log), SessionFollower(event_log)
        for _ in range(2):  # reading on changes nothing
            seen, noted = await follower.refresh(), await sessions.refresh()
        recent = SessionFollower(event_log)
        await recent.begin_recent(seen)
        assert len((await recent.refresh()).sessions) == len(book.sessions)
    assert (seen.events, seen.by_version, seen.evaluations) == (fold.events, fold.by_version, fold.evaluations)
    assert (seen.staleness, seen.lost_lengths, seen.dropped) == (fold.staleness, fold.lost_lengths, fold.dropped)
    assert {s: (n.end, len(n.turns), len(n.calls)) for s, n in noted.sessions.items()} == {
        s: (n.end, len(n.turns), len(n.calls)) for s, n in book.sessions.items()
    }


async def test_traces_rebuilt_from_the_log_are_the_ones_that_were_sent(
    written: RunLog, fresh_config: KafkaConfig
) -> None:
    """Same ids, same tree: what a collector missed can be had from the log."""
    maker = SpanMaker.of("test")
    live: list[ReadableSpan] = []
    running: dict[str, SessionSpans] = {}
    for record in written.of("sessions.v1"):
        fold = running.setdefault(record.key or "", SessionSpans(record.key or "", maker))
        live += [] if fold.ended else fold.take(record.event.body, record.timestamp_ms * 1_000_000)
    async with EventLog(fresh_config) as event_log:
        seen, book = await RunFollower(event_log).refresh(), await SessionFollower(event_log).refresh()
        wanted = newest_sessions(book, 0)
        rebuilt = [span async for spans in session_traces(event_log, book, wanted, maker) for span in spans]
    assert len(rebuilt) > 500
    assert {identity_of(span) for span in rebuilt} == {identity_of(span) for span in live}
    roots = {span.context.span_id for span in rebuilt if span.name == "session" and span.context}
    gradings = [span for span in later_spans(seen, wanted, maker) if span.name == "grading"]
    assert len(gradings) == len(roots) == len(book.sessions)
    assert {span.parent.span_id for span in gradings if span.parent} == roots


def identity_of(span: ReadableSpan) -> tuple[str, int, int, int]:
    assert span.context is not None
    return span.name, span.context.trace_id, span.context.span_id, span.parent.span_id if span.parent else 0


def test_the_commands_answer_from_the_log_alone(asked: Any, tmp_path: Path, written: RunLog) -> None:
    """One test: a process joins the broker anew for each command."""
    listed = json.loads(asked("session", "list", "--origin", "rl", "--limit", "0", "--json"))
    assert len(listed) == 48 and {row["end"] for row in listed} == {"done"}
    shown = asked("session", "show", "group-012-s0")
    assert "→ edit_file(" in shown and "under version 0" in shown and "reward" in shown
    transcript = json.loads(asked("session", "show", "group-012-s0", "--json"))
    assert [entry["kind"] for entry in transcript["entries"]][:3] == ["opened", "message", "turn"]
    frame = json.loads(asked("watch", "--json", "--no-actors"))
    assert (frame["version"], frame["steps"], frame["in_flight"]) == (3, 3, {"production": 0, "rl": 0, "eval": 0})
    page = tmp_path / "page.html"
    told = json.loads(asked("report", "--out", str(page), "--json"))
    assert told["records"] == len(written.records) and "Solve rate against weight version" in page.read_text()
    assert [(line["lane"], line["batches"], line["steps"]) for line in told["lanes"]] == [("main-0", 3, 3)]
    apart = json.loads(asked("report", "--out", str(page), "--lane", "main-0", "--json"))
    assert apart == told | {"bytes": apart["bytes"]} and "of lane main-0" in page.read_text()
    assert "there is main-0" in asked("report", "--out", str(page), "--lane", "other-2", "--json", code=2)
    with collecting() as collector:
        sent = json.loads(asked("dashboard", "--otlp", collector.endpoint, "--sessions", "0", "--json"))
    assert sent["sessions"] == 72 and sent["spans"] == len(collector.spans) == len({s.span_id for s in collector.spans})
    assert "no session 'nobody'" in asked("session", "show", "nobody", "--json", code=2)
    assert "72 sessions begin with" in asked("session", "show", "group-", "--json", code=2)
    assert "is not a folder" in asked("report", "--out", str(tmp_path / "a" / "b.html"), "--json", code=2)
