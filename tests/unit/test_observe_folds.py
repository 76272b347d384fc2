"""A run's numbers, from a log that the real event types and the real assembly wrote."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from support.folded import folded
from support.run_log import LANE, Run, small_run

from odradek.infra.cli.status import actor_rows, disk_rows
from odradek.infra.observe.actors import SILENT_S, ActorView, ActorWatcher, NotRunning
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.frame import Frame, frame, lags
from odradek.infra.observe.screen import as_text
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.observe.utilisation import utilisation
from odradek.infra.stack import stack as stack_module
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import GroupDiscarded
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import ToolCompleted, TurnSampled


def test_sessions_turns_and_calls_are_counted_once() -> None:
    log = small_run()
    _, book = folded(log)
    bodies = [record.event.body for record in log.of("sessions.v1")]
    assert sum(len(note.turns) for note in book.sessions.values()) == sum(isinstance(b, TurnSampled) for b in bodies)
    assert book.finished_calls == sum(isinstance(b, ToolCompleted) for b in bodies)
    assert (book.ignored, book.headless, book.unfinished) == (0, 0, [])


def test_a_repeated_record_and_a_former_owners_change_nothing() -> None:
    log = small_run(versions=1)
    fold, book = folded(log)
    for record in log.of("sessions.v1")[:40]:
        event = record.event
        far = msgspec.structs.replace(record.ref, offset=record.ref.offset + 10_000)
        book.apply(far, record.key or "", event.id, event.meta, event.body, record.timestamp_ms)
    for record in log.of("rewards.v1"):
        fold.apply(record.ref, record.event.id, record.event.meta, record.event.body, record.timestamp_ms)
    again, fresh = folded(log)
    assert {s: (len(n.turns), len(n.calls), n.end) for s, n in book.sessions.items()} == {
        s: (len(n.turns), len(n.calls), n.end) for s, n in fresh.sessions.items()
    }
    assert (fold.by_version, fold.evaluations) == (again.by_version, again.evaluations)
    assert book.ignored > 0


def test_a_reader_that_begins_in_the_middle_counts_what_it_can_not_place() -> None:
    book = SessionBook()
    records = small_run(versions=1).of("sessions.v1")
    for record in records[5:30]:
        event = record.event
        book.apply(record.ref, record.key or "", event.id, event.meta, event.body, record.timestamp_ms)
    assert book.headless > 0
    assert sum(book.events.values()) == 25


def test_staleness_lengths_and_lags_are_those_of_the_log() -> None:
    run = Run(seed=3)
    run.log.append("groups.v1", LANE.lane, LANE)
    run.publish(0)
    for _ in range(4):
        run.group(0.5)
    run.discard()
    run.train()
    run.group(0.5)  # sealed, in no batch yet
    run.open_group(attempts=4)
    fold, book = folded(run.log)
    batch = next(b for b in (r.event.body for r in run.log.of("batches.v1")) if isinstance(b, BatchAssembled))
    assert fold.staleness == Counter(batch.ordinal - member.oldest_version for member in batch.members)
    dropped = [length for group in batch.dropped for length in group.sampled_tokens]
    decisions = [r.event.body for r in run.log.of("groups.v1")]
    lost = [length for b in decisions if isinstance(b, GroupDiscarded) for length in b.member_tokens]
    assert sorted(length for lengths in fold.lost_lengths.values() for length in lengths) == sorted(dropped + lost)
    assert {lag.consumer: lag.count for lag in lags(fold, book)} == {
        "reward": 0, "assembler main-0": 1, "trainer": 0, "controller": 0, "inference-0": 0,
    }  # fmt: skip
    assert (len(fold.open_groups), fold.steps[0].seconds) == (1, 2.5)


def test_a_greedy_evaluation_is_not_mixed_with_a_sampled_one_nor_a_run_of_eval_with_another() -> None:
    run = Run()
    run.publish(0)
    for suffix in ("@v0t1", "@v0t0", "@v0t0.5", "@v0t1/a", "@v0t1/a~1", "@v0t0/a"):
        run.group(1.0, attempts=1, purpose="eval", labels={"set": "s"}, suffix=suffix)
    assert {key: c.sessions for key, c in folded(run.log)[0].evaluations.items()} == {
        (0, "s"): 1, (0, "s (greedy)"): 1, (0, "s (temperature 0.5)"): 1, (0, "s (run a)"): 2,
        (0, "s (greedy, run a)"): 1,
    }  # fmt: skip


def test_an_ended_session_without_a_verdict_is_the_reward_actors_lag() -> None:
    run = Run()
    run.publish(0)
    group = run.open_group(attempts=2)
    run.session(group, 0, 0.5)
    run.session(group, 1, 0.5)
    run.log.records = [r for r in run.log.records if not isinstance(r.event.body, RewardAssigned)]
    assert {lag.consumer: lag.count for lag in lags(*folded(run.log))}["reward"] == 2


def test_utilisation_shares_out_every_second_of_work() -> None:
    fold, book = folded(small_run())
    used = utilisation(fold, book)
    worked = {name: sum(values[:-1]) * used.bin_s for name, values in used.curves.items()}
    turns = [turn for note in book.sessions.values() for turn in note.turns]
    sampled = sum(turn.prefill_ms + turn.decode_ms for turn in turns) / 1000
    assert 0.9 * sampled < worked["sampling"] <= sampled + 1e-6
    assert used.bin_s == 10.0  # a run of under six minutes
    assert set(used.curves) == {"sampling", "waiting for the engine", "tool calls", "grading", "training"}


def a_frame() -> Frame:
    log = small_run()
    fold, book = folded(log)
    views = [
        ActorView("controller", True, None, {"waiting_tasks": 12, "open_groups": 2}),
        ActorView("inference-0", True, 0.93, {"version": 3, "running": 44}),
        ActorView("reward-0", False),
        ActorView("session-0", True, None, {"active": ["a"], "oldest_wait_s": 41.0, "oldest_wait_for": "s1: turn 3"}),
        ActorView("session-1", True, None, {"active": ["b"], "oldest_wait_s": 2.0, "oldest_wait_for": "s2: the log"}),
    ]
    return frame(fold, book, views, log.now_ms)


def test_a_frame_names_the_oldest_wait_and_for_whom() -> None:
    wait = a_frame().oldest_wait
    assert wait is not None
    assert (wait.seconds, wait.what, wait.host) == (41.0, "s1: turn 3", "session-0")


def test_held_out_rates_come_with_their_trials_and_interval() -> None:
    rows = {row.version: row for row in a_frame().versions}
    rate = rows[3].held_out["new_combinations"]
    assert rate.count == 4 and 0.0 <= rate.low <= rate.rate <= rate.high <= 1.0
    assert set(rows[0].held_out) == {"new_combinations", "unseen_identifiers", "unseen_templates"}
    assert rows[1].held_out == {} and rows[1].training.count == 16


def test_the_screen_says_what_the_frame_holds_at_any_width() -> None:
    shown = a_frame()
    for width in (60, 80, 140):
        text = as_text(shown, width=width)
        flat = " ".join(text.split())
        for part in ("weights: version 3", "tool calls/s", "reward-0", "oldest wait: 41 s for s1: turn 3 (session-0)"):
            assert part in flat, (width, part)
        assert max(len(line) for line in text.splitlines()) <= width


def test_without_actors_the_log_is_enough_and_the_screen_says_why() -> None:
    fold, book = folded(small_run(versions=1))
    text = as_text(frame(fold, book, [], 0), actors_absent="actors were not asked: ray is not running")
    assert "actors were not asked: ray is not running" in text and "groups sealed" in text


def test_an_empty_log_is_a_picture_too() -> None:
    text = as_text(frame(RunFold(), SessionBook(), [], 0))
    assert "version none yet" in text and "sessions in flight: none" in text


def test_a_frame_is_one_json_document() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(a_frame()), type=Frame)
    assert decoded.steps == 3 and decoded.staleness == {0: 44}


async def test_work_per_second_is_the_difference_of_two_answers_and_an_absent_actor_is_down() -> None:
    now, busy = [100.0], {"trainer": 5.0}

    async def ask(name: str) -> dict[str, float]:
        if name not in busy:
            raise NotRunning(name)
        return {"busy_s": busy[name]}

    watcher = ActorWatcher(["trainer", "assembler"], ask, lambda: now[0])
    first = await watcher.look()
    assert [(v.name, v.up, v.work_rate, v.note) for v in first] == [
        ("trainer", True, None, ""), ("assembler", False, None, "not running"),
    ]  # fmt: skip
    now[0], busy["trainer"] = 110.0, 12.0
    assert (await watcher.look())[0].work_rate == 0.7
    now[0], busy["trainer"] = 120.0, 1.0  # it was restarted: its counter began again
    assert (await watcher.look())[0].work_rate is None
    busy["assembler"] = 0.0
    assert (await watcher.look())[1].up


async def test_an_actor_that_has_not_answered_its_first_question_is_not_called_down_before_its_time() -> None:
    now, gate = [0.0], asyncio.Event()

    async def ask(_name: str) -> dict[str, float]:
        await gate.wait()
        return {}

    watcher = ActorWatcher(["trainer"], ask, lambda: now[0])
    await watcher.look(0.01)
    now[0] = SILENT_S - 1
    early = (await watcher.look(0.01))[0]
    assert early.asked and "down" not in as_text(frame(RunFold(), SessionBook(), [early], 0))
    now[0] = SILENT_S
    late = (await watcher.look(0.01))[0]
    assert not late.asked and "down: no answer for 20 s" in as_text(frame(RunFold(), SessionBook(), [late], 0))
    await watcher.close()


async def test_a_slow_actor_keeps_its_last_answer_and_is_down_only_when_it_stays_silent() -> None:
    now, gate = [0.0], asyncio.Event()
    gate.set()

    async def ask(_name: str) -> dict[str, float]:
        await gate.wait()
        return {"busy_s": now[0] / 2}

    watcher = ActorWatcher(["trainer"], ask, lambda: now[0])
    assert (await watcher.look())[0].state == {"busy_s": 0.0}
    gate.clear()
    now[0] = 5.0
    await watcher.look(0.01)
    now[0] = 8.0
    slow = (await watcher.look(0.01))[0]
    assert (slow.up, slow.state, slow.note) == (True, {"busy_s": 0.0}, "its answer of 8 s ago")
    now[0] = 5.0 + SILENT_S
    silent = (await watcher.look(0.01))[0]
    assert (silent.up, silent.note) == (False, "no answer for 20 s")
    gate.set()
    assert (await watcher.look())[0].work_rate == 0.5
    gate.clear()
    await watcher.look(0.01)
    await watcher.close()


async def test_an_actor_that_stands_down_answers_and_is_shown_as_unhealthy_with_its_reason() -> None:
    fault = "stands down: stage controller: a newer holder has taken over"

    async def ask(name: str) -> dict[str, str]:
        return {"fault": fault if name == "controller" else "", "address": "http://127.0.0.1:1"}

    views = await ActorWatcher(["controller", "telemetry"], ask).look()
    assert [(view.name, view.up, view.note) for view in views] == [("controller", True, fault), ("telemetry", True, "")]
    actors, metrics = actor_rows(views, embedded=True)
    assert (actors.health, actors.reason) == ("unhealthy", f"controller {fault}")
    assert metrics.health == "running"
    assert actor_rows(views[1:], embedded=True)[0].health == "running"


async def test_an_engine_that_cannot_serve_its_weights_is_shown_as_unhealthy_and_has_not_stopped() -> None:
    async def ask(name: str) -> dict[str, str]:
        return {"fault": "", "refused": "version 1 can't be loaded: a shard is gone", "address": "http://127.0.0.1:1"}

    views = await ActorWatcher(["inference-0"], ask).look()
    assert (views[0].up, views[0].note) == (True, "version 1 can't be loaded: a shard is gone")
    actors, _ = actor_rows(views, embedded=True)
    assert (actors.health, actors.reason) == ("unhealthy", f"inference-0 {views[0].note}")


async def test_an_actor_that_has_not_answered_in_time_is_silent_not_stopped_and_the_load_is_named() -> None:
    """On a busy host actors that work answer late; nothing is known against them."""

    async def ask(name: str) -> dict[str, str]:
        if name == "session-0":
            raise NotRunning(name)
        await asyncio.Event().wait()
        return {}

    watcher = ActorWatcher(["controller", "telemetry", "session-0"], ask)
    views = await watcher.look(0.01)
    actors, metrics = actor_rows(views[:2], embedded=True)
    assert (actors.health, actors.address, metrics.health) == ("silent", "0 of 2 answer", "silent")
    known = r"no answer within 0 s from controller, telemetry \(host load \d+ on \d+ cores\); nothing says .*"
    assert re.fullmatch(known, actors.reason)
    broken = actor_rows(views, embedded=True)[0]
    assert broken.health == "unhealthy" and broken.reason.startswith("not session-0 (not running); no answer within ")
    await watcher.close()


def test_a_disk_without_room_is_a_row_of_status_with_what_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sandboxes are refused on it; to everybody else the job just stands still."""
    monkeypatch.setattr(stack_module, "MIN_FREE_MB", 0)
    assert disk_rows(tmp_path) == [] and disk_rows(tmp_path / "none") == []
    monkeypatch.setattr(stack_module, "MIN_FREE_MB", 2**40)
    (row,) = disk_rows(tmp_path)
    assert (row.name, row.health) == ("disk", "unhealthy")
    assert row.reason.startswith(f"{tmp_path} has ") and row.reason.endswith("no sandbox is made until there is room")
