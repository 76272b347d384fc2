"""Export from a real log: which sessions, which rows, and the same bytes each time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as parquet
import pytest
import pytest_asyncio
from support.small_log import COMPLETION, LAST, PROMPT, RESULT, SmallLog, write_small_log

from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.subjects import ConsentWithdrawn
from odradek.streams.log import EventLog
from odradek.streams.replay.export import ExportReport, Row, export
from odradek.streams.replay.formats import JsonlWriter, ParquetWriter, parquet_schema
from odradek.streams.replay.select import Filter, OffsetRange

pytestmark = [pytest.mark.contract, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(kafka_bootstrap: str) -> AsyncIterator[SmallLog]:
    """One log for the module; its tests only read, except the last."""
    config = KafkaConfig(bootstrap=kafka_bootstrap, prefix=f"texport{datetime.now(UTC):%H%M%S%f}")
    await ensure_topics(config)
    async with EventLog(config) as log:
        yield await write_small_log(log)


class Kept:
    """A writer that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)


def shown(ids: Any) -> str:
    return " ".join(map(str, ids))


async def rows(small: SmallLog, **wanted: Any) -> tuple[list[Row], ExportReport]:
    kept = Kept()
    report = await export(small.log, Filter(**wanted), shown, kept)
    assert report.rows == len(kept.rows)
    return kept.rows, report


async def ids(small: SmallLog, **wanted: Any) -> set[str]:
    return {row.session_id for row in (await rows(small, **wanted))[0]}


RL = {"a.0", "a.1", "flat.0", "flat.1", "b.0", "b.1", "c.0", "c.1"}


async def test_evaluation_is_left_out_and_production_needs_consent_that_stands(small: SmallLog) -> None:
    found, report = await rows(small)
    assert {row.session_id for row in found} == RL | {"p-ann"}
    expected = {"origin eval": 1, "consent": 1, "unfinished": 1, "failed": 1, "undecodable": 2}
    assert report.left_out == expected
    assert await ids(small, origins=frozenset({"eval"})) == {"e.0"}
    assert await ids(small, origins=frozenset({"production"})) == {"p-ann"}


async def test_a_row_holds_what_the_trainer_sees_and_what_was_said_of_it(small: SmallLog) -> None:
    (row,), _ = await rows(small, tasks=frozenset({"task-a"}), min_reward=0.5)
    assert row.tokens == PROMPT + COMPLETION + RESULT + LAST
    assert row.mask == [0] * 4 + [1] * 3 + [0] * 4 + [1] * 2
    assert row.versions == [-1] * 4 + [0] * 3 + [-1] * 4 + [1] * 2
    assert row.logprobs[4:6] == [-0.5, -1.25] and row.logprobs[0] == 0.0
    assert (row.oldest_version, row.newest_version, row.segment_starts) == (0, 1, [0])
    assert (row.reward, row.reward_components["solved"], row.grader) == (1.0, 1.0, "hidden-tests")
    assert (row.group_id, row.task_id, row.labels) == ("a", "task-a", {"set": "train"})
    assert row.task.startswith("tasks.v1/") and row.batch_ordinal == 0 and row.advantage == 0.5
    assert [(part.kind, part.name, part.text) for part in row.transcript] == [
        ("message", "user", "mend a.0\n\tplease"),
        ("turn", "", "60 61 62"),
        ("call", "read_file", '{"path":"a.py"}'),
        ("result", "read_file", "1\tdef a():\n"),
        ("turn", "", "63 3"),
    ]


async def test_each_filter_selects_by_its_own_rule(small: SmallLog) -> None:
    assert await ids(small, tasks=frozenset({"task-a", "task-c"})) == {"a.0", "a.1", "c.0", "c.1"}
    assert await ids(small, labels=(("set", "train"),)) == {"a.0", "a.1"}
    assert await ids(small, labels=(("set", "train"), ("other", "x"))) == set()
    assert await ids(small, min_reward=0.5) == {"a.0", "b.0", "c.1"}
    assert await ids(small, min_reward=0.5, max_reward=0.75) == {"b.0", "c.1"}
    assert await ids(small, versions=(0, 1)) == {"a.0", "a.1", "flat.0", "flat.1", "p-ann"}
    assert await ids(small, versions=(2, 9)) == {"c.0", "c.1"}
    assert await ids(small, trained=True) == {"a.0", "a.1", "b.0", "b.1"}


async def test_offsets_select_by_where_a_session_opens(small: SmallLog) -> None:
    partition, first, _ = small.sessions["b.1"]
    assert await ids(small, offsets=(OffsetRange(partition, first, first),)) == {"b.1"}
    assert "b.1" not in await ids(small, offsets=(OffsetRange(partition, first + 1, first + 1),))


async def test_time_selects_by_when_a_session_opens(small: SmallLog) -> None:
    found, _ = await rows(small)
    opened = sorted(row.opened_ms for row in found)
    middle = datetime.fromtimestamp(opened[4] / 1000, UTC)
    before, since = await ids(small, until=middle), await ids(small, since=middle)
    assert before | since == RL | {"p-ann"} and not before & since
    assert len(since) == sum(ms >= opened[4] for ms in opened)
    assert await ids(small, since=datetime.now(UTC) + timedelta(hours=1)) == set()


async def test_rows_are_in_log_order_and_the_same_filter_gives_the_same_bytes(small: SmallLog, tmp_path: Path) -> None:
    found, _ = await rows(small)
    places = [(row.partition, row.first_offset) for row in found]
    assert places == sorted(places)
    for name in ("one", "two"):
        with JsonlWriter(tmp_path / name) as writer:
            await export(small.log, Filter(), shown, writer)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    lines = (tmp_path / "one").read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=Row) for line in lines] == found


async def test_parquet_holds_the_same_rows_with_exact_types(small: SmallLog, tmp_path: Path) -> None:
    found, _ = await rows(small)
    with ParquetWriter(tmp_path / "rows.parquet", b'{"asked":1}') as writer:
        for row in found:
            writer.write(row)
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert table.schema.remove_metadata() == parquet_schema()
    assert table.schema.metadata[b"odradek.filter"] == b'{"asked":1}'
    read = table.to_pylist()
    for row in read:
        row["labels"], row["reward_components"] = dict(row["labels"]), dict(row["reward_components"])
    assert [msgspec.convert(row, Row) for row in read] == found


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_a_file_that_could_not_be_finished_does_not_appear(small: SmallLog, tmp_path: Path) -> None:
    for kind in (JsonlWriter, ParquetWriter):
        with pytest.raises(RuntimeError, match="stop"), kind(tmp_path / "out") as writer:
            for row in (await rows(small))[0]:
                writer.write(row)
            raise RuntimeError("stop")
        assert names_in(tmp_path) == []


async def test_a_withdrawn_consent_takes_the_sessions_out(small: SmallLog) -> None:
    await small.append("subjects.v1", "ann", ConsentWithdrawn(subject="ann"), "ann", "withdrawn")
    assert await ids(small, origins=frozenset({"production"})) == set()
