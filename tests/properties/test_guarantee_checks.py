"""The checks of the fault harness: silent on a sound run, and each names its guarantee wherever the damage lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.audit_world import anchored
from support.crash import world as worlds
from support.crash.checks import CHECKS, GUARANTEES, violations
from support.crash.world import Answer, Seen, World, world_of
from support.run_log import small_run

from odradek.streams.codec import f32
from odradek.streams.envelope import Record
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.batches import BatchAssembled, StepCompleted
from odradek.streams.events.groups import GroupOpened, GroupSealed
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    MessageReceived,
    SessionCompleted,
    SessionFailed,
    SessionResumed,
    ToolCompleted,
    TurnSampled,
    WeightSpan,
)
from odradek.streams.events.subjects import ErasureDone
from odradek.streams.events.tasks import HiddenCase, HiddenTests, TaskPublished
from odradek.streams.events.weights import VersionPublished

TESTS = HiddenTests(
    module="shop", function="total", cases=[HiddenCase(id="a", args=[], want=1)], fail_to_pass=["a"], pass_to_pass=[]
)
ANCHORS = "audit.anchors.v1"
Damage = Callable[[World, int], World]
"""A world with one thing wrong; the number says where."""


@cache
def sound() -> World:
    """A small run with its tasks and everything that a client, a host and replay would say of it."""
    records = small_run(versions=2, groups=5, evaluations=1, seed=1).records
    run = world_of(records)
    log = {**run.log, ANCHORS: anchors_of(records)}
    log["rewards.v1"] = [
        seen._replace(body=msgspec.structs.replace(seen.body, tests_passed=["a"])) for seen in log["rewards.v1"]
    ]
    log["tasks.v1"] = [
        Seen(
            body.task, "k", f"id {body.task}", Meta(), TaskPublished(task_id=body.task_id, instruction="", tests=TESTS)
        )
        for _, body in run.bodies("groups.v1", GroupOpened)
    ]
    batches = [body.batch_id for _, body in run.bodies("batches.v1", BatchAssembled) if body.members]
    assert len(batches) == 2, "the damage needs members in every batch"
    return World(
        log,
        acknowledged=[(seen.ref, seen.id) for seen in log["tasks.v1"]],
        rebuilt=dict.fromkeys(batches, True),
        answers=[Answer("controller", "open groups", 0, 0)],
        leaves=run.leaves,
    )


def anchors_of(records: Sequence[Record]) -> list[Seen]:
    """What the product's notary signs of a log: two stretches of each partition, where it has two records."""
    bodies: list[AnchorWritten] = []
    for place in sorted({(record.ref.topic, record.ref.partition) for record in records}):
        there = [record for record in records if (record.ref.topic, record.ref.partition) == place]
        bodies += anchored(sorted(there, key=lambda record: record.ref), (len(there) + 1) // 2, place=place)
    return [Seen(RecordRef(ANCHORS, 0, n), "k", f"anchor {n}", Meta(), body) for n, body in enumerate(bodies)]


def with_log(world: World, topic: str, records: Sequence[Seen]) -> World:
    return replace(world, log={**world.log, topic: sorted(records, key=lambda seen: seen.ref)})


def pick(world: World, topic: str, number: int, *kinds: type) -> Seen:
    found = world.bodies(topic, *kinds)
    return found[number % len(found)][0]


def drop(topic: str, *kinds: type) -> Damage:
    def damage(world: World, number: int) -> World:
        gone = pick(world, topic, number, *kinds)
        return with_log(world, topic, [seen for seen in world.log[topic] if seen.ref != gone.ref])

    return damage


def change(topic: str, kind: type, edit: Callable[[Any], Any]) -> Damage:
    def damage(world: World, number: int) -> World:
        there = pick(world, topic, number, kind)
        changed = there._replace(body=edit(there.body))
        return with_log(world, topic, [changed if seen.ref == there.ref else seen for seen in world.log[topic]])

    return damage


def repeat(topic: str, kind: type) -> Damage:
    """The event once more, at the end of its partition."""

    def damage(world: World, number: int) -> World:
        there = pick(world, topic, number, kind)
        end = 1 + max(seen.ref.offset for seen in world.log[topic] if seen.ref.partition == there.ref.partition)
        again = there._replace(ref=RecordRef(topic, there.ref.partition, end))
        return with_log(world, topic, [*world.log[topic], again])

    return damage


def run_again(world: World, number: int) -> World:
    """A later owner logs a result for a call that has one."""
    topic, there = "sessions.v1", pick(world, "sessions.v1", number, ToolCompleted)
    end = 1 + max(seen.ref.offset for seen in world.log[topic] if seen.ref.partition == there.ref.partition)
    resumed = Seen(
        RecordRef(topic, there.ref.partition, end), there.key, "r", Meta(), SessionResumed(session_id=there.key)
    )
    result = there._replace(ref=RecordRef(topic, there.ref.partition, end + 1), id="other", meta=Meta(epoch=end, seq=0))
    return with_log(world, topic, [*world.log[topic], resumed, result])


def other_bits(world: World, number: int) -> World:
    """A session samples what another one did; the last bit of its last log-probability is another one."""
    there = pick(world, "sessions.v1", number, TurnSampled)
    opened, turns = world.accepted[there.key][0], world.bodies("sessions.v1", TurnSampled)
    said = [body for seen, body in turns if seen.key == there.key and seen.ref <= there.ref]
    changed = bytes([*said[-1].logprobs[:-4], said[-1].logprobs[-4] ^ 1, *said[-1].logprobs[-3:]])
    bodies = [opened.body, *said[:-1], msgspec.structs.replace(said[-1], logprobs=changed)]
    end = 1 + max(seen.ref.offset for seen in world.log["sessions.v1"] if seen.ref.partition == there.ref.partition)
    metas = [Meta(), *(Meta(epoch=end, seq=n) for n in range(len(said)))]
    twin = [
        Seen(RecordRef("sessions.v1", there.ref.partition, end + n), "twin", f"twin {n}", meta, body)
        for n, (meta, body) in enumerate(zip(metas, bodies, strict=True))
    ]
    return with_log(world, "sessions.v1", [*world.log["sessions.v1"], *twin])


def erased(world: World, number: int) -> World:
    """Whoever asked for a session is erased; their message is still there."""
    there = pick(world, "sessions.v1", number, MessageReceived)
    return replace(named(world, batches=[]), words={"ann": there.body.text.encode()})


def named(world: World, batches: list[str]) -> World:
    """The erasure of a subject that says so of these batches."""
    done = Seen(RecordRef("subjects.v1", 0, 0), "ann", "done", Meta(), ErasureDone(
        subject="ann", request_id="r", batches=batches
    ))  # fmt: skip
    return with_log(world, "subjects.v1", [done])


def of_somebody(world: World, number: int) -> World:
    """A batch holds the session of a subject whose erasure names none."""
    return named(of_another(world, number), [])


def signed(change: Callable[[AnchorWritten], AnchorWritten] | None) -> Damage:
    """The first of two stretches of every partition is signed for something else, or not at all."""

    def damage(world: World, number: int) -> World:
        places = [place for place, there in world.leaves.items() if len(there) > 1]
        place = places[number % len(places)]
        anchors = [seen for seen in world.log[ANCHORS] if (seen.body.topic, seen.body.partition) == place]
        first = anchors[0]
        others = [seen for seen in world.log[ANCHORS] if seen.ref != first.ref]
        kept = [] if change is None else [first._replace(body=change(first.body))]
        return with_log(world, ANCHORS, [*others, *kept])

    return damage


def of_another(world: World, number: int) -> World:
    """A production session of somebody who never agreed, in a batch."""
    batch = pick(world, "batches.v1", number, BatchAssembled).body
    session = batch.members[number % len(batch.members)].session_id
    records = [
        seen._replace(meta=msgspec.structs.replace(seen.meta, origin="production", subject="ann"))
        if seen.key == session
        else seen
        for seen in world.log["sessions.v1"]
    ]
    return with_log(world, "sessions.v1", records)


def failed(body: SessionCompleted) -> SessionFailed:
    return SessionFailed(cause="host gone", first_offset=body.first_offset, group_id=body.group_id)


def stale(batch: BatchAssembled) -> BatchAssembled:
    members = [msgspec.structs.replace(m, masked_stale_tokens=1 + m.masked_stale_tokens) for m in batch.members]
    return msgspec.structs.replace(batch, members=members)


def forgetful(batch: BatchAssembled) -> BatchAssembled:
    return msgspec.structs.replace(batch, groups=batch.groups[1:])


def inventive(batch: BatchAssembled) -> BatchAssembled:
    return msgspec.structs.replace(batch, groups=[*batch.groups, 10_000])


def untold(**fields: Any) -> Damage:
    def damage(world: World, _number: int) -> World:
        return replace(world, **fields)

    return damage


DAMAGE: list[tuple[str, str, Damage]] = [
    ("durable", "acknowledged_events_are_on_the_log", drop("tasks.v1", TaskPublished)),
    ("durable", "every_task_is_decided", drop("groups.v1", GroupOpened)),
    ("durable", "every_end_has_a_verdict", drop("rewards.v1", RewardAssigned)),
    ("one history", "answers_are_folds_of_the_log", untold(answers=[Answer("controller", "open groups", 1, 0)])),
    ("resume", "no_call_with_a_logged_result_runs_again", run_again),
    ("trained once", "steps_and_batches_pair_up", drop("batches.v1", StepCompleted, BatchAssembled)),
    ("trained once", "steps_and_batches_pair_up", repeat("batches.v1", StepCompleted)),
    ("trained once", "every_seal_goes_into_one_batch", change("batches.v1", BatchAssembled, forgetful)),
    ("trained once", "every_seal_goes_into_one_batch", change("batches.v1", BatchAssembled, inventive)),
    ("trained once", "no_session_is_trained_twice", repeat("batches.v1", BatchAssembled)),
    ("trained once", "every_step_publishes_one_version", repeat("weights.v1", VersionPublished)),
    ("rebuilt", "every_batch_is_rebuilt_byte_for_byte", untold(rebuilt={})),
    (
        "known policy",
        "every_token_carries_a_published_version",
        change("sessions.v1", TurnSampled, lambda body: msgspec.structs.replace(body, spans=[WeightSpan(0, 77)])),
    ),
    (
        "known policy",
        "every_token_carries_a_published_version",
        change("sessions.v1", TurnSampled, lambda body: msgspec.structs.replace(body, spans=[WeightSpan(1, 0)])),
    ),
    ("known policy", "stale_tokens_are_masked", change("batches.v1", BatchAssembled, stale)),
    (
        "same numbers",
        "every_token_has_its_log_probability",
        change("sessions.v1", TurnSampled, lambda body: msgspec.structs.replace(body, logprobs=f32([0.5]))),
    ),
    ("same numbers", "the_same_tokens_have_the_same_bits", other_bits),
    ("erasure", "nothing_of_an_erased_subject_can_be_read", erased),
    ("erasure", "an_erasure_names_every_batch_that_holds_them", of_somebody),
    ("erasure", "an_erasure_names_every_batch_that_holds_them", lambda world, _: named(world, ["no batch"])),
    (
        "tamper evidence",
        "every_signature_stands_for_all_that_is_stored",
        signed(lambda anchor: msgspec.structs.replace(anchor, root="0" * 64)),
    ),
    (
        "tamper evidence",
        "every_signature_stands_for_all_that_is_stored",
        signed(lambda anchor: msgspec.structs.replace(anchor, count=anchor.count + 1)),
    ),
    ("tamper evidence", "every_signature_stands_for_all_that_is_stored", signed(None)),
    ("tamper evidence", "the_log_is_as_it_was_signed", untold(altered=["sessions.v1/3@7: changed"])),
    ("consent", "production_is_trained_on_with_consent_only", of_another),
    (
        "failure is no reward",
        "only_finished_sessions_have_a_score",
        change("sessions.v1", SessionCompleted, failed),
    ),
    (
        "failure is no reward",
        "a_score_reports_every_hidden_test",
        change("rewards.v1", RewardAssigned, lambda body: msgspec.structs.replace(body, tests_passed=[])),
    ),
    ("nothing waits for ever", "every_wait_ends_in_time", untold(waits=["the trainer did not step"])),
    ("nothing waits for ever", "every_session_ends_with_a_reason", drop("sessions.v1", SessionCompleted)),
    ("nothing waits for ever", "every_group_is_closed_once", drop("groups.v1", GroupSealed)),
    ("nothing waits for ever", "every_group_is_closed_once", repeat("groups.v1", GroupSealed)),
    ("nothing is left", "the_host_is_clean", untold(left=["process 1: bwrap"])),
]


def test_a_sound_run_breaks_no_guarantee() -> None:
    assert violations(sound()) == []


def test_a_run_that_stands_still_is_reported_once_and_not_thing_by_thing() -> None:
    world = drop("sessions.v1", SessionCompleted)(sound(), 0)
    world = World(world.log, rebuilt=world.rebuilt, waits=["no step within 180 s"], settled=False)
    assert {v.what for v in violations(world) if v.guarantee == "nothing waits for ever"} == {"no step within 180 s"}


@pytest.mark.parametrize(
    ("guarantee", "check", "damage"), DAMAGE, ids=[f"{check}-{n}" for n, (_, check, _) in enumerate(DAMAGE)]
)
@settings(max_examples=10, deadline=None)
@given(number=st.integers(0, 10_000))
def test_damage_anywhere_is_named(guarantee: str, check: str, damage: Damage, number: int) -> None:
    found = violations(damage(sound(), number))
    assert (guarantee, check) in {(v.guarantee, v.check) for v in found}


def test_a_rule_of_ownership_that_accepts_a_former_owner_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks use the product's rule, so they look at what it accepted as well."""
    monkeypatch.setattr(worlds, "accepted", lambda records: iter(records))
    world = repeat("sessions.v1", ToolCompleted)(sound(), 3)
    assert "one_owner_at_a_time_speaks_for_a_session" in {v.check for v in violations(world)}


def test_every_check_has_damage_that_it_notices() -> None:
    """A check that nothing trips checks nothing."""
    shown = {check for _, check, _ in DAMAGE} | {
        "one_owner_at_a_time_speaks_for_a_session",
        "each_owner_rebuilds_the_workspace_first",
        "a_batch_holds_scored_members_only",
    }
    assert {check.__name__ for _, check in CHECKS} == shown
    assert {name for name, _ in CHECKS} <= GUARANTEES.keys()


def test_a_call_before_the_workspace_is_rebuilt_is_noticed() -> None:
    world = sound()
    there = pick(world, "sessions.v1", 0, ToolCompleted)
    records = [
        seen
        for seen in world.log["sessions.v1"]
        if not (seen.key == there.key and type(seen.body).__name__ == "EnvironmentOpened")
    ]
    renumbered, seq = [], 0
    for seen in records:
        if seen.key == there.key and seen.meta.seq >= 0:
            seen, seq = seen._replace(meta=msgspec.structs.replace(seen.meta, seq=seq)), seq + 1
        renumbered.append(seen)
    found = violations(with_log(world, "sessions.v1", renumbered))
    assert "each_owner_rebuilds_the_workspace_first" in {v.check for v in found}


def test_a_batch_with_a_made_up_reward_is_noticed() -> None:
    edit = change("batches.v1", BatchAssembled, lambda b: msgspec.structs.replace(b, members=[invented(b.members[0])]))
    assert "a_batch_holds_scored_members_only" in {v.check for v in violations(edit(sound(), 0))}


def invented(member: Any) -> Any:
    return msgspec.structs.replace(member, total=member.total + 1)
