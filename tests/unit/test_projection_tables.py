"""Tables and views as pure functions: repetition is harmless, partitions merge at read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odradek.streams.config import KafkaConfig
from odradek.streams.envelope import Record, encode
from odradek.streams.events.groups import GroupDiscarded, GroupOpened, GroupSealed
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardRevised
from odradek.streams.log import EventLog
from odradek.streams.privacy.content import CONTENT
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing
from odradek.streams.projections import app, views
from odradek.streams.projections.tables import CURRICULUM, GROUPS, REWARDS, TABLES, Rows, Table
from odradek.streams.schemas import golden
from odradek.streams.schemas.catalog import CATALOG
from odradek.streams.testing import an_event


def record(topic: str, partition: int, offset: int, body: object) -> Record:
    value, headers = encode(an_event(body))
    return Record(RecordRef(topic=topic, partition=partition, offset=offset), b"k", value, headers, 0)


def graded(session: str, group: str, solved: float, version: int = 1) -> RewardAssigned:
    return RewardAssigned(
        session_id=session,
        group_id=group,
        partition=0,
        first_offset=0,
        last_offset=0,
        grader="g",
        grader_version="1",
        components={"solved": solved},
        total=solved,
        newest_version=version,
        turns=2,
        parallel_turns=1,
        reads_before_edit=True,
    )


def opened(group: str, task: str, lane: str = "lane-0") -> GroupOpened:
    return GroupOpened(
        group_id=group,
        lane=lane,
        ordinal=0,
        task=RecordRef(topic="tasks.v1", partition=0, offset=0),
        task_id=task,
        task_digest="d",
        purpose="rl",
        policy="p",
        sessions=["a", "b"],
        version=0,
        deadline_ms=0,
    )


def folded(table: Table, records: list[Record]) -> Rows:  # type: ignore[type-arg]
    rows: Rows = {}
    for one in records:
        table.step(rows, one)
    return rows


LOG = [
    record("rewards.v1", number % 3, number // 3, graded(f"s{number % 7}", f"g{number % 2}", float(number % 2)))
    for number in range(30)
]


@given(st.lists(st.integers(0, 29), max_size=60))
def test_events_delivered_again_change_nothing(repeats: list[int]) -> None:
    """At least once: after any crash the worker sees old records again, anywhere behind where it had come."""
    for table in (REWARDS, CURRICULUM):
        rows = folded(table, LOG)
        before = dict(rows)
        for number in repeats:
            table.step(rows, LOG[number])
        assert rows == before


def test_the_first_reward_of_a_session_stands_and_revisions_are_counted() -> None:
    revised = RewardRevised(
        session_id="s", group_id="g", grader="g", grader_version="2", components={}, total=9.0, reason="r"
    )
    bodies = [graded("s", "g", 1.0), graded("s", "g", 0.0), revised]
    rows = folded(REWARDS, [record("rewards.v1", 0, offset, body) for offset, body in enumerate(bodies)])
    ((key, row),) = REWARDS.rows(rows)
    assert (key, row.total, row.revisions) == ("s", 1.0, 1)


def test_a_group_ends_once() -> None:
    bodies = [
        opened("g", "t"),
        GroupSealed(group_id="g", lane="lane-0", reason="complete", members=[]),
        GroupDiscarded(group_id="g", lane="lane-0", reason="cancelled"),
    ]
    rows = folded(GROUPS, [record("groups.v1", 0, offset, body) for offset, body in enumerate(bodies)])
    view = views.lanes(rows)["lane-0"]
    assert (view.open, view.sealed, view.discarded) == (0, 1, {})


def test_rows_of_one_key_in_two_partitions_merge_at_read() -> None:
    groups = folded(
        GROUPS, [record("groups.v1", lane, 0, opened(f"g{lane}", "task", f"lane-{lane}")) for lane in (0, 1)]
    )
    rewards = [
        record("rewards.v1", 0, 0, graded("a", "g0", 1.0)),
        record("rewards.v1", 1, 0, graded("b", "g0", 0.0)),
        record("rewards.v1", 1, 1, graded("c", "g1", 1.0)),
    ]
    curriculum = folded(CURRICULUM, rewards)
    assert len(curriculum) == 3
    solved = views.tasks(groups, curriculum)["task"]
    assert (solved.attempts, solved.solved, solved.rate) == (3, 2.0, 2 / 3)


def test_versions_are_told_apart_by_purpose_and_number() -> None:
    groups = folded(GROUPS, [record("groups.v1", 0, 0, opened("g", "task"))])
    rewards = folded(
        REWARDS,
        [
            record("rewards.v1", 0, 0, graded("a", "g", 1.0, version=1)),
            record("rewards.v1", 0, 1, graded("b", "g", 0.0, version=1)),
            record("rewards.v1", 0, 2, graded("c", "g", 1.0, version=2)),
            record("rewards.v1", 0, 3, graded("d", "", 1.0, version=2)),
        ],
    )
    found = [(one.purpose, one.version, one.sessions, one.mean_total) for one in views.versions(groups, rewards)]
    assert found == [("production", 2, 1, 1.0), ("rl", 1, 2, 0.5), ("rl", 2, 1, 1.0)]
    assert views.versions(groups, rewards)[1].parallel_turn_share == 0.5


SOMEBODYS = [(table, kind) for table in TABLES for kind in CATALOG[table.topic] if kind in CONTENT]
SECRET = "the plaintext marker"


@pytest.mark.parametrize(("table", "kind"), SOMEBODYS, ids=lambda one: getattr(one, "__name__", "") or one.name)
async def test_the_worker_reads_without_keys_so_that_no_row_holds_what_a_person_said(
    table: Table,  # type: ignore[type-arg]
    kind: type[msgspec.Struct],
    tmp_path: Path,
) -> None:
    """Guarantee 9: `subject erase` says that there is nothing to erase in tables."""
    body = golden.samples(kind)["full"]
    texts = {name: SECRET for name in CONTENT[kind] if isinstance(getattr(body, name), str)}
    event = an_event(msgspec.structs.replace(body, **texts), meta=Meta(origin="production", subject="ann"))
    config = KafkaConfig(bootstrap="127.0.0.1:9")
    value, headers = await EventLog(config, keys=KeyRing(KeyFiles(tmp_path))).encoded(table.topic.name, "k", event)
    message = SimpleNamespace(partition=0, offset=0, key=b"k", value=value, headers=list(headers), timestamp=0)
    rows = folded(table, [app._record(config, table, message)])
    assert rows or table.key(event) is None
    assert not any(SECRET.encode() in row for row in rows.values())
