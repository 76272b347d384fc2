"""The metrics page: the declared names and no others, numbers of the log, served on loopback."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.folded import folded
from support.run_log import START_MS, Run, small_run

from odradek.actors.telemetry import identity
from odradek.actors.telemetry.spans import SpanMaker
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.telemetry.actor import port_of
from odradek.infra.telemetry.batches import BatchSpans, batch_spans
from odradek.infra.telemetry.errors import MetricsPortTaken
from odradek.infra.telemetry.metrics import NAMES, MetricsServer, collect

VIEWS = [
    ActorView("controller", True, None, {"waiting_tasks": 12, "open_groups": 2, "expected_staleness": 1.5}),
    ActorView("inference-0", True, 0.93, {"version": 3, "running": 44, "waiting": 1, "busy_s": 20.5}),
    ActorView("reward-0", False),
    ActorView("session-0", True, None, {"active": ["a", "b"], "oldest_wait_s": 4.0, "oldest_wait_for": "s1: turn 3"}),
]


def fetched(fold: RunFold, book: SessionBook, views: list[ActorView]) -> dict[str, dict[tuple[str, ...], float]]:
    """The page over HTTP, by name and label values."""
    server = MetricsServer(lambda: collect(fold, book, views, START_MS))
    address = server.start()
    try:
        text = urllib.request.urlopen(address, timeout=10).read().decode()
    finally:
        server.stop()
    return {
        family.name: {
            tuple(sample.labels[label] for label in NAMES[family.name][1]): sample.value for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


def test_a_page_has_the_declared_names_and_no_others() -> None:
    found = fetched(*folded(small_run()), VIEWS)
    assert set(found) == set(NAMES)
    assert all(found[name] for name in NAMES), [name for name in NAMES if not found[name]]


def test_numbers_are_those_of_the_log_and_of_the_actors() -> None:
    fold, book = folded(small_run())
    found = fetched(fold, book, VIEWS)
    assert found["odradek_sessions_ended"] == {("rl", "done"): 48, ("eval", "done"): 24}
    assert sum(found["odradek_tool_calls"].values()) == book.finished_calls
    assert found["odradek_rewards"] == {("assigned",): 72, ("ungraded",): 0}
    assert found["odradek_solve_rate"] == {(str(v),): c.solve_rate for v, c in fold.by_version.items()}
    assert found["odradek_steps"] == {(): 3}
    assert found["odradek_weight_version"] == {("published",): 3, ("current",): 3}
    assert found["odradek_oldest_wait_seconds"] == {("session-0", "s1", "turn 3"): 4.0}
    assert found["odradek_actor_up"][("reward-0",)] == 0
    assert found["odradek_actor_queue"][("session-0", "active")] == 2
    assert found["odradek_actor_busy_seconds"] == {("inference-0",): 20.5}
    assert found["odradek_consumer_lag"][("trainer", "batches without a step")] == 0


def test_an_empty_log_is_a_valid_page() -> None:
    found = fetched(RunFold(), SessionBook(), [])
    assert found["odradek_groups_open"] == {(): 0}


def test_the_page_is_on_loopback_and_its_port_is_free_again_after_the_end() -> None:
    server = MetricsServer(list)
    address = server.start()
    assert address.startswith("http://127.0.0.1:")
    port = int(address.split(":")[2].split("/")[0])
    server.stop()
    server.stop()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(MetricsPortTaken, match=rf"127\.0\.0\.1:{port} .*telemetry\.prometheus_port"):
            MetricsServer(list).start(port)


def test_the_address_outlives_the_page_as_long_as_its_port_is_free(tmp_path: Path) -> None:
    """A scraper is configured once."""
    first = port_of(tmp_path)
    server = MetricsServer(list)
    server.start(first)
    assert port_of(tmp_path / "other") != first
    server.stop()
    assert port_of(tmp_path) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        assert port_of(tmp_path) != first


def test_forgetting_ended_sessions_changes_no_counter() -> None:
    fold, book = folded(small_run())
    before = fetched(fold, book, VIEWS)
    assert book.prune(keep=5) == 72 - 5
    assert len(book.sessions) == 5
    after = fetched(fold, book, VIEWS)
    assert after == before


def test_batches_and_steps_are_sent_once_and_what_was_there_before_is_not() -> None:
    sent = []
    spans = BatchSpans(SpanMaker.of("loop"), sent.append)  # type: ignore[arg-type]
    run = Run()
    run.publish(0)
    for _ in range(3):
        run.group(0.5)
    run.train()
    spans.skip(folded(run.log)[0])
    for _ in range(2):
        for _ in range(3):
            run.group(0.5)
        run.train()
        fold = folded(run.log)[0]
        assert spans.send(fold) == 2
        assert spans.send(fold) == 0
    assert [span.name for span in sent] == [
        "assemble batch 1", "train step 2", "assemble batch 2", "train step 3"
    ]  # fmt: skip
    assert BatchSpans.of("").send(folded(run.log)[0]) == 0


def test_assembly_lasts_from_the_first_seal_and_training_from_the_batch() -> None:
    fold, _ = folded(small_run(versions=1))
    assembled, trained = batch_spans(fold, SpanMaker.of("loop"))
    batch = next(iter(fold.batches.values()))
    first = min(fold.seals[batch.lane].values())
    assert assembled.start_time == first * 1_000_000
    assert assembled.end_time == trained.start_time
    assert (trained.end_time or 0) - (trained.start_time or 0) == 2_500_000_000
    assert {link.context.trace_id for link in trained.links} == {
        identity.trace_id(member.session_id) for member in batch.members
    }
