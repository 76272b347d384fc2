"""The guarantees of DESIGN §1 as checks over a run that has come to rest. Pure: no clock, no client, no actor.

`violations` names the guarantee that does not hold, with the coordinates to look at. The checks follow the log's own
words and share as little as possible with the code that they judge; where they do (the rule of one owner), they check
that rule's outcome as well. What no log can show (that a trainer has the same numbers, text in stores beside the log)
has tests of its own: `tests/GUARANTEES.md` lists all of them. One file for `checks`, because each is a few lines and
they are read together.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from odradek.streams.codec import read_f32, read_i32
from odradek.streams.events.audit import AnchorWritten
from odradek.streams.events.batches import BatchAssembled, BatchMember, StepCompleted
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed, LaneConfigured, MemberReplaced
from odradek.streams.events.rewards import RewardAssigned
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    SessionCompleted,
    SessionOpened,
    SessionResumed,
    ToolCompleted,
    TurnSampled,
)
from odradek.streams.events.subjects import ConsentGranted, ErasureDone
from odradek.streams.events.tasks import TaskCancelled
from odradek.streams.events.weights import VersionPublished
from support.crash.stored import root
from support.crash.tokens import Sampled, sampled, token_versions
from support.crash.world import World


class Violation(NamedTuple):
    """One broken promise: which guarantee, which check saw it, and what it saw where."""

    guarantee: str
    check: str
    what: str


Check = Callable[[World], Iterator[str]]
CHECKS: list[tuple[str, Check]] = []
"""(guarantee, check), in the order of DESIGN §1. A check yields one line for each thing that is wrong."""

GUARANTEES = {
    "durable": 1,
    "one history": 2,
    "resume": 3,
    "trained once": 4,
    "rebuilt": 5,
    "known policy": 6,
    "same numbers": 7,
    "consent": 8,
    "erasure": 9,
    "tamper evidence": 10,
    "failure is no reward": 11,
    "nothing waits for ever": 12,
    "nothing is left": 0,
}
"""Short names and their numbers in DESIGN §1; 0 is issue 4's own: no sandbox, mount, process or group is left."""


def _guarantee(name: str) -> Callable[[Check], Check]:
    assert name in GUARANTEES

    def register(check: Check) -> Check:
        CHECKS.append((name, check))
        return check

    return register


def violations(world: World) -> list[Violation]:
    """Everything that is wrong, guarantee by guarantee."""
    return [Violation(name, check.__name__, what) for name, check in CHECKS for what in check(world)]


# -- 1: durable -------------------------------------------------------------------------------------------------------


@_guarantee("durable")
def acknowledged_events_are_on_the_log(world: World) -> Iterator[str]:
    for ref, identifier in world.acknowledged:
        seen = world.at(ref.topic, ref.partition, ref.offset)
        if seen is None or seen.id != identifier:
            yield f"{identifier} was acknowledged at {ref}, which holds {seen.id if seen else 'nothing'}"


@_guarantee("durable")
def every_task_is_decided(world: World) -> Iterator[str]:
    """A task leads to a group, to a refusal, or was cancelled before; the same key twice is one task."""
    decided = {body.task for _, body in world.bodies("groups.v1", GroupOpened, GroupDiscarded)}
    cancelled = {body.task_id for _, body in world.bodies("tasks.v1", TaskCancelled)}
    keys = Counter[str](body.idempotency_key or body.task_id for ref, body in world.tasks.items() if ref in decided)
    yield from (f"task {key} became {count} groups" for key, count in keys.items() if count > 1)
    for ref, task in world.tasks.items() if world.settled else ():
        if ref not in decided and task.task_id not in cancelled and not keys[task.idempotency_key or task.task_id]:
            yield f"task {task.task_id} at {ref} was never decided"


@_guarantee("durable")
def every_end_has_a_verdict(world: World) -> Iterator[str]:
    """A grader that commits its position before its verdict loses the session."""
    for session, end in world.ends.items() if world.settled else ():
        if end.body.group_id and end.meta.origin != "production" and session not in world.verdicts:
            yield f"session {session} ended at {end.ref} and has no verdict"


# -- 2: one history ---------------------------------------------------------------------------------------------------


@_guarantee("one history")
def answers_are_folds_of_the_log(world: World) -> Iterator[str]:
    for answer in world.answers:
        if answer.said != answer.folded:
            yield f"{answer.who}: {answer.what} is {answer.said!r}, the log says {answer.folded!r}"


@_guarantee("one history")
def one_owner_at_a_time_speaks_for_a_session(world: World) -> Iterator[str]:
    """What counts follows the newest owner, without a hole, and each id once. A takeover that was written twice is one
    epoch under either offset."""
    for session, records in world.accepted.items():
        epochs, following, ids = set[int](), 0, set[str]()
        for seen in records:
            if isinstance(seen.body, SessionOpened | SessionResumed):
                epochs = {other.ref.offset for other in world.sessions[session] if other.id == seen.id}
                following = 0
            elif seen.meta.seq >= 0:
                if seen.meta.epoch not in epochs or seen.meta.seq != following:
                    yield (
                        f"session {session} at {seen.ref}: counted event {seen.meta.seq} of epoch {seen.meta.epoch}, "
                        f"expected {following} of {sorted(epochs)}"
                    )
                following += 1
            if seen.id in ids:
                yield f"session {session} at {seen.ref}: id {seen.id} counted twice"
            ids.add(seen.id)


# -- 3: resume --------------------------------------------------------------------------------------------------------


@_guarantee("resume")
def no_call_with_a_logged_result_runs_again(world: World) -> Iterator[str]:
    """A result that a later owner logs for a call that already has one was run again. What a former owner still logs,
    and the same record delivered twice, is neither."""
    for session, records in world.sessions.items():
        results = {seen.body.call_id: seen for seen in world.accepted[session] if isinstance(seen.body, ToolCompleted)}
        counted = Counter(seen.body.call_id for seen in world.accepted[session] if isinstance(seen.body, ToolCompleted))
        yield from (f"session {session}: call {call} has {n} results" for call, n in counted.items() if n > 1)
        for seen in records:
            first = results.get(seen.body.call_id) if isinstance(seen.body, ToolCompleted) else None
            if first is not None and seen.ref > first.ref and seen.meta.epoch > first.meta.epoch:
                yield f"session {session}: call {seen.body.call_id} of {first.ref} ran again at {seen.ref}"


@_guarantee("resume")
def each_owner_rebuilds_the_workspace_first(world: World) -> Iterator[str]:
    for session, records in world.accepted.items():
        opened, before = -1, False
        for seen in records:
            match seen.body:
                case EnvironmentOpened(rebuilt=rebuilt):
                    opened = seen.meta.epoch
                    if rebuilt != before:
                        yield f"session {session} at {seen.ref}: rebuilt={rebuilt}, though it had {before or 'no'} box"
                    before = True
                case ToolCompleted(is_error=False) if opened != seen.meta.epoch:
                    yield f"session {session} at {seen.ref}: a call ran before its owner rebuilt the workspace"
                case _:
                    pass


# -- 4: trained once --------------------------------------------------------------------------------------------------


def _lanes(world: World) -> list[str]:
    return sorted({body.lane for _, body in world.bodies("batches.v1", BatchAssembled, StepCompleted)})


@_guarantee("trained once")
def steps_and_batches_pair_up(world: World) -> Iterator[str]:
    for lane in _lanes(world):
        batches = world.lane_of(lane, "batches.v1", BatchAssembled)
        steps = world.lane_of(lane, "batches.v1", StepCompleted)
        ordinals = [body.ordinal for _, body in batches]
        if ordinals != list(range(len(batches))):
            yield f"lane {lane}: batch ordinals are {ordinals}"
        numbers = [body.step for _, body in steps]
        if numbers != list(range(1, len(steps) + 1)):
            yield f"lane {lane}: steps are {numbers}"
        for (_, step), (seen, batch) in zip(steps, batches, strict=False):
            if (step.batch_id, step.batch_offset) != (batch.batch_id, seen.ref.offset):
                yield f"lane {lane}: step {step.step} trained {step.batch_id}, expected {batch.batch_id} at {seen.ref}"
        if len(steps) > len(batches) or (world.settled and len(steps) != len(batches)):
            yield f"lane {lane}: {len(batches)} batches, {len(steps)} steps"


@_guarantee("trained once")
def every_seal_goes_into_one_batch(world: World) -> Iterator[str]:
    """Kept or dropped with a reason, by exactly one batch, up to the last batch's input."""
    for lane in _lanes(world):
        batches = [body for _, body in world.lane_of(lane, "batches.v1", BatchAssembled)]
        used = Counter(offset for b in batches for offset in [*b.groups, *(d.offset for d in b.dropped)])
        last = max((b.input_offset for b in batches), default=-1)
        seals = {seen.ref.offset: body for seen, body in world.lane_of(lane, "groups.v1", GroupSealed)}
        for offset, seal in seals.items():
            if used[offset] != (offset <= last):
                yield f"lane {lane}: group {seal.group_id} sealed at {offset} is in {used[offset]} batches"
        yield from (f"lane {lane}: a batch names {offset}, which is no seal" for offset in used.keys() - seals.keys())


@_guarantee("trained once")
def no_session_is_trained_twice(world: World) -> Iterator[str]:
    members = Counter(m.session_id for _, b in world.bodies("batches.v1", BatchAssembled) for m in b.members)
    yield from (f"session {session} is in {count} batches" for session, count in members.items() if count > 1)


@_guarantee("trained once")
def every_step_publishes_one_version(world: World) -> Iterator[str]:
    for lane in _lanes(world):
        steps = {body.step: body for _, body in world.lane_of(lane, "batches.v1", StepCompleted)}
        published = Counter(body.version for _, body in world.lane_of(lane, "weights.v1", VersionPublished))
        wanted = {0, *steps}
        if (published or steps) and published != Counter(dict.fromkeys(wanted, 1)):
            yield f"lane {lane}: versions {dict(published)} published for steps {sorted(steps)}"
        for _, body in world.lane_of(lane, "weights.v1", VersionPublished):
            step = steps.get(body.version)
            if step is not None and (body.batch_id, body.manifest_sha256) != (step.batch_id, step.manifest_sha256):
                yield f"lane {lane}: version {body.version} names batch {body.batch_id}, its step {step.batch_id}"


# -- 5: rebuilt byte for byte -----------------------------------------------------------------------------------------


@_guarantee("rebuilt")
def every_batch_is_rebuilt_byte_for_byte(world: World) -> Iterator[str]:
    for seen, batch in world.bodies("batches.v1", BatchAssembled):
        if not world.rebuilt.get(batch.batch_id, False):
            yield f"batch {batch.batch_id} (ordinal {batch.ordinal}) at {seen.ref} is not rebuilt byte for byte"


# -- 6: known policy --------------------------------------------------------------------------------------------------


@_guarantee("known policy")
def every_token_carries_a_published_version(world: World) -> Iterator[str]:
    published = {(body.policy, body.version) for _, body in world.bodies("weights.v1", VersionPublished)}
    for session, records in world.accepted.items():
        opened = next((seen.body for seen in records if isinstance(seen.body, SessionOpened)), None)
        for seen in records:
            if opened is None or not isinstance(seen.body, TurnSampled):
                continue
            versions = token_versions(seen.body)
            if versions is None:
                yield f"session {session} at {seen.ref}: spans {seen.body.spans} do not cover the turn"
                continue
            unknown = {version for version in versions if (opened.policy, version) not in published}
            if unknown:
                yield f"session {session} at {seen.ref}: sampled under {sorted(unknown)}, never published"
            if opened.pinned_version is not None and set(versions) - {opened.pinned_version}:
                yield f"session {session} at {seen.ref}: pinned to {opened.pinned_version}, sampled {set(versions)}"


@_guarantee("known policy")
def stale_tokens_are_masked(world: World) -> Iterator[str]:
    """The bound, counted again from the tokens of exactly the records that a batch names."""
    for seen, batch in world.bodies("batches.v1", BatchAssembled):
        config = world.at("groups.v1", seen.ref.partition, batch.config_offset)
        if config is None or not isinstance(config.body, LaneConfigured):
            yield f"batch {batch.batch_id} names no configuration at groups.v1@{batch.config_offset}"
            continue
        for member in batch.members:
            versions = _versions(world, member)
            stale = sum(batch.ordinal - version > config.body.max_staleness for version in versions)
            found = (member.masked_stale_tokens, member.trained_tokens)
            if found != (stale, len(versions) - stale):
                yield (
                    f"batch {batch.ordinal}, session {member.session_id}: {found[0]} tokens masked and {found[1]} "
                    f"trained, expected {stale} and {len(versions) - stale}"
                )
            if versions and max(versions) > batch.ordinal:
                yield f"batch {batch.ordinal} holds tokens of version {max(versions)}, which it precedes"


def _versions(world: World, member: BatchMember) -> list[int]:
    inside = range(member.first_offset, member.last_offset + 1)
    turns = [
        seen.body
        for seen in world.accepted.get(member.session_id, ())
        if isinstance(seen.body, TurnSampled) and seen.ref.offset in inside
    ]
    return [version for turn in turns for version in token_versions(turn) or ()]


# -- 7: same numbers --------------------------------------------------------------------------------------------------


@_guarantee("same numbers")
def every_token_has_its_log_probability(world: World) -> Iterator[str]:
    for session, records in world.accepted.items():
        for seen in records:
            if isinstance(seen.body, TurnSampled):
                values, count = read_f32(seen.body.logprobs), len(read_i32(seen.body.completion))
                if len(values) != count or not all(map(math.isfinite, values)) or not seen.body.numerics_id:
                    yield f"session {session} at {seen.ref}: {count} tokens, {len(values)} log-probs, not all usable"


@_guarantee("same numbers")
def the_same_tokens_have_the_same_bits(world: World) -> Iterator[str]:
    """Attempts at a task begin alike, so a run samples many tokens again: in another batch, on another engine, after a
    crash. Under one version and `numerics_id` each has one log-probability."""
    first: dict[bytes, Sampled] = {}
    for token in sampled(world):
        before = first.setdefault(token.given, token)
        if token.logprob != before.logprob:
            yield (
                f"token {token.index} of the turn at {token.seen.ref} has log-prob {token.logprob.hex()}, the same one "
                f"in the same context was {before.logprob.hex()} as token {before.index} at {before.seen.ref}"
            )


# -- 8: consent -------------------------------------------------------------------------------------------------------


@_guarantee("consent")
def production_is_trained_on_with_consent_only(world: World) -> Iterator[str]:
    steps = {body.batch_id: body for _, body in world.bodies("batches.v1", StepCompleted)}
    for seen, batch in world.bodies("batches.v1", BatchAssembled):
        step = steps.get(batch.batch_id)
        for member in batch.members:
            opened = world.accepted.get(member.session_id, [])[:1]
            if not opened or opened[0].meta.origin == "rl":
                continue
            who = opened[0].meta.subject
            if opened[0].meta.origin != "production" or not _consented(world, who, batch.subjects_offset):
                yield f"batch at {seen.ref} holds session {member.session_id} of {who!r} without consent"
            elif step and not _consented(world, who, step.subjects_offset) and member.session_id not in step.left_out:
                yield f"step {step.step} trained session {member.session_id} of {who!r} after consent was withdrawn"


def _consented(world: World, subject: str, end: int) -> bool:
    told = [seen.body for seen in world.log.get("subjects.v1", ()) if seen.key == subject and seen.ref.offset < end]
    return bool(told) and isinstance(told[-1], ConsentGranted)


# -- 9: erasure -------------------------------------------------------------------------------------------------------


def _erased(world: World) -> dict[str, ErasureDone]:
    return {body.subject: body for _, body in world.bodies("subjects.v1", ErasureDone)}


@_guarantee("erasure")
def nothing_of_an_erased_subject_can_be_read(world: World) -> Iterator[str]:
    """Looked for by their own words, in all that this reader could open: which fields are somebody's is the judged
    code's own opinion."""
    for subject in _erased(world).keys() & world.words.keys():
        for seen in (seen for records in world.log.values() for seen in records):
            if world.words[subject] in msgspec.msgpack.encode((seen.key, seen.meta, seen.body)):
                yield f"{subject!r} is erased, and {type(seen.body).__name__} at {seen.ref} still says what they said"


@_guarantee("erasure")
def an_erasure_names_every_batch_that_holds_them(world: World) -> Iterator[str]:
    whose = {session: records[0].meta.subject for session, records in world.sessions.items()}
    for subject, done in _erased(world).items():
        held = {
            body.batch_id
            for _, body in world.bodies("batches.v1", BatchAssembled)
            if any(whose.get(member.session_id) == subject for member in body.members)
        }
        if held != set(done.batches):
            yield f"the erasure of {subject!r} names batches {sorted(done.batches)}, they are in {sorted(held)}"


# -- 10: tamper evidence ----------------------------------------------------------------------------------------------


@_guarantee("tamper evidence")
def the_log_is_as_it_was_signed(world: World) -> Iterator[str]:
    yield from world.altered


@_guarantee("tamper evidence")
def every_signature_stands_for_all_that_is_stored(world: World) -> Iterator[str]:
    """The hashes of each signed stretch, made here from the stored bytes; and no record between two stretches."""
    places = {place: sorted(there) for place, there in world.leaves.items()}
    reached: dict[tuple[str, str, int], int] = {}
    for seen, anchor in world.bodies("audit.anchors.v1", AnchorWritten):
        place, chain = (anchor.topic, anchor.partition), (anchor.deployment, anchor.topic, anchor.partition)
        offsets = places.get(place, [])
        start, end = bisect_left(offsets, anchor.first), bisect_right(offsets, anchor.last)
        inside = [world.leaves[place][offset] for offset in offsets[start:end]]
        if len(inside) != anchor.count or root(inside).hex() != anchor.root:
            yield f"the anchor at {seen.ref} does not fit {place[0]}/{place[1]}, {anchor.first} to {anchor.last}"
        if missed := offsets[bisect_right(offsets, reached.get(chain, -1)) : start]:
            yield f"{place[0]}/{place[1]}: no anchor covers {len(missed)} records from {missed[0]} on"
        reached[chain] = anchor.last


# -- 11: a failure of ours is never a reward --------------------------------------------------------------------------


@_guarantee("failure is no reward")
def only_finished_sessions_have_a_score(world: World) -> Iterator[str]:
    for session, seen in world.verdicts.items():
        end = world.ends.get(session)
        if not isinstance(seen.body, RewardAssigned):
            continue
        if end is None or not isinstance(end.body, SessionCompleted):
            yield f"session {session} is scored {seen.body.total} at {seen.ref}, but it {'failed' if end else 'runs'}"
        elif seen.body.last_offset != end.ref.offset:
            yield f"session {session} is scored up to {seen.body.last_offset}, but ended at {end.ref}"


@_guarantee("failure is no reward")
def a_score_reports_every_hidden_test(world: World) -> Iterator[str]:
    """A grader that could not run has nothing to report: a score without its tests is made up."""
    for session, seen in world.verdicts.items():
        records = world.accepted.get(session, [])
        opened = next((s.body for s in records if isinstance(s.body, SessionOpened)), None)
        task = world.tasks.get(opened.task) if opened is not None and opened.task is not None else None
        if task is None or task.tests is None or not isinstance(seen.body, RewardAssigned):
            continue
        reported = Counter([*seen.body.tests_passed, *seen.body.tests_failed])
        if reported != Counter(case.id for case in task.tests.cases):
            yield f"session {session} is scored {seen.body.total} at {seen.ref} on {reported.total()} reported tests"


@_guarantee("failure is no reward")
def a_batch_holds_scored_members_only(world: World) -> Iterator[str]:
    for seen, batch in world.bodies("batches.v1", BatchAssembled):
        for member in batch.members:
            verdict = world.at(member.reward.topic, member.reward.partition, member.reward.offset)
            body = verdict.body if verdict is not None else None
            if not isinstance(body, RewardAssigned) or (body.session_id, body.total) != (
                member.session_id,
                member.total,
            ):
                yield f"batch at {seen.ref}: member {member.session_id} has no such reward at {member.reward}"


# -- 12: nothing waits for ever ---------------------------------------------------------------------------------------


@_guarantee("nothing waits for ever")
def every_wait_ends_in_time(world: World) -> Iterator[str]:
    yield from world.waits


@_guarantee("nothing waits for ever")
def every_session_ends_with_a_reason(world: World) -> Iterator[str]:
    for session, records in world.accepted.items() if world.settled else ():
        end = world.ends.get(session)
        if end is None:
            yield f"session {session} opened at {records[0].ref if records else '?'} never ended"
        elif not (end.body.reason if isinstance(end.body, SessionCompleted) else end.body.cause):
            yield f"session {session} ended at {end.ref} without a reason"


@_guarantee("nothing waits for ever")
def every_group_is_closed_once(world: World) -> Iterator[str]:
    closed = Counter(body.group_id for _, body in world.bodies("groups.v1", GroupSealed, GroupDiscarded))
    opened = Counter(body.group_id for _, body in world.bodies("groups.v1", GroupOpened))
    yield from (f"group {group} was opened {count} times" for group, count in opened.items() if count > 1)
    yield from (f"group {group} was closed {count} times" for group, count in closed.items() if count > 1)
    if world.settled:
        yield from (f"group {group} was opened and never closed" for group in opened.keys() - closed.keys())
    members: dict[str, set[str]] = {}
    for _, body in world.bodies("groups.v1", GroupOpened, MemberReplaced):
        names = body.sessions if isinstance(body, GroupOpened) else [body.new_session]
        members.setdefault(body.group_id, set()).update(names)
    for seen, seal in world.bodies("groups.v1", GroupSealed):
        strangers = {member.session_id for member in seal.members} - members.get(seal.group_id, set())
        if strangers and seal.group_id in members:
            yield f"group {seal.group_id} sealed at {seen.ref} with {sorted(strangers)}, who were never its members"


# -- nothing is left --------------------------------------------------------------------------------------------------


@_guarantee("nothing is left")
def the_host_is_clean(world: World) -> Iterator[str]:
    yield from world.left
