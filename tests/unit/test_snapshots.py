"""Snapshots (streams/snapshots.py): what can be taken is given back, everything else is dropped with its reason."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

import pytest
from support.controller_world import LANE, MemoryLog

from odradek.streams import faults, snapshots
from odradek.streams.snapshots import KEPT, Mark, Snapshots, code_hash, sources_of, unlike

MARKS = [Mark("groups.v1", 3, 0, 42, 41, b"leaf")]
FOLD = "odradek.actors.controller.past"
POINTS = [point for point in faults.POINTS if point.startswith("snapshot.")]


async def saved(folder: Path, *states: bytes, key: str = "key") -> Path:
    for state in states or (b"state",):
        await Snapshots(folder, key).save(MARKS, state)
    return files(folder, ".snapshot")[-1]


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"*{suffix}"))


def states(folder: Path, key: str = "key") -> list[bytes]:
    return [snapshot.state for _, snapshot in Snapshots(folder, key).load()]


async def test_the_newest_snapshots_are_given_back_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert states(folder) == [], "there is none yet: nothing to say"
    await saved(folder, *(str(number).encode() for number in range(12)))
    assert states(folder) == [str(number).encode() for number in (11, 10)] and KEPT == 2
    (_, found), _ = Snapshots(folder, "key").load()
    assert found.marks == MARKS
    assert {file.suffix for file in folder.iterdir()} == {".snapshot"}, "no half-written file is left"
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


async def test_whatever_byte_is_damaged_or_missing_it_is_dropped_and_the_one_before_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = await saved(tmp_path, b"older", b"state")
    whole = file.read_bytes()
    damaged = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for data in [*damaged, *(whole[:length] for length in range(len(whole))), whole + b"x"]:
        file.write_bytes(data)
        file.chmod(0o600)
        caplog.clear()
        assert states(tmp_path) == [b"older"]
        assert len(caplog.messages) == 1 and "the log is folded instead" in caplog.text and not file.exists()


@pytest.mark.parametrize("point", POINTS)
async def test_a_writer_killed_at_any_moment_leaves_what_can_be_used(tmp_path: Path, point: str) -> None:
    await saved(tmp_path, b"before")

    async def killed() -> None:
        raise faults.Killed

    with faults.armed(point, killed), pytest.raises(faults.Killed):
        await saved(tmp_path, b"after")
    assert states(tmp_path)[0] == (b"before" if point == "snapshot.written" else b"after")
    (tmp_path / "0000000009.77.tmp").write_bytes(b"odradek snap")  # killed while it wrote
    assert states(tmp_path)[0] == (b"before" if point == "snapshot.written" else b"after")
    await saved(tmp_path, b"next")
    assert states(tmp_path)[0] == b"next" and not files(tmp_path, ".tmp")


async def test_a_snapshot_of_another_key_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = await saved(tmp_path, key="code of yesterday")
    assert states(tmp_path, "code of today") == []
    assert "another release, another log or other settings made it" in caplog.text and not file.exists()


async def test_a_snapshot_that_others_may_write_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (await saved(tmp_path)).chmod(0o666)
    assert states(tmp_path) == [] and "others may write it" in caplog.text


async def test_a_disk_that_takes_nothing_is_told_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    await Snapshots(tmp_path / "file" / "folder", "key").save(MARKS, b"state")
    assert "was not written" in caplog.text


# -- is it the log that was folded ------------------------------------------------------------------------------------


async def marked(log: MemoryLog) -> list[Mark]:
    """A log of three records, folded whole."""
    for at_ms in range(3):
        log.append("groups.v1", LANE.lane, LANE, at_ms)
    log.show_all()
    last = log.records["groups.v1", 0][-1]
    return [Mark("groups.v1", 0, 0, 0).after(last, 3), Mark("groups.v1", 1, 0, 0)]


async def test_the_log_that_was_folded_is_known_again_when_it_has_grown() -> None:
    log = MemoryLog()
    marks = await marked(log)
    log.append("groups.v1", LANE.lane, LANE, 9)
    log.show_all()
    assert await unlike(cast(Any, log), marks) == ""


@pytest.mark.parametrize(
    "fault", ["shorter", "other last record", "same event at another time", "begins later", "none"]
)
async def test_any_other_log_is_told_apart(fault: str) -> None:
    """Restored from an earlier moment, made anew and written again, or pruned."""
    log, other = MemoryLog(), MemoryLog()
    marks = await marked(log)
    times = {"shorter": [0, 1], "other last record": [0, 1, 2], "none": []}.get(fault, [0, 1, 7, 8])
    for at_ms in times:
        other.append("groups.v1", LANE.lane, LANE, at_ms)
    if fault == "other last record":
        other.records["groups.v1", 0][-1].value = b"x"
    if fault == "begins later":
        other = log
        log.first = 1
    other.show_all()
    said = await unlike(cast(Any, other), marks)
    wanted = {"begins later": "begins at 1, expected 0", "shorter": "ends at 2, expected 3", "none": "ends at 0"}
    assert wanted.get(fault, "groups.v1/0@2 holds another record") in said


# -- the code that folds ----------------------------------------------------------------------------------------------


def test_the_hash_covers_every_module_of_ours_that_the_fold_imports() -> None:
    """Found here by the parser; `sources_of` reads lines."""
    found = sources_of([FOLD])
    for name, source in found.items():
        for node in ast.walk(ast.parse(source)):
            imported = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: a relative import is not followed"
                imported = [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]
            elif isinstance(node, ast.Import):
                imported = [one.name for one in node.names]
            for one in imported:
                assert not sources_of([one]) or one in found, f"{name} imports {one}"
    of_the_fold = ["core", "intake", "groups", "endings", "admission", "identity"]
    assert {f"odradek.actors.controller.{one}" for one in of_the_fold} <= found.keys()
    assert {"odradek.streams.sealing", "odradek.streams.events.groups", "odradek.streams.codec"} <= found.keys()


def test_a_changed_source_is_another_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    before, sources = code_hash(FOLD), sources_of([FOLD])
    assert code_hash(FOLD) == before
    for name in sources:
        changed = sources | {name: sources[name] + b"#"}
        monkeypatch.setattr(snapshots, "sources_of", lambda _modules, changed=changed: changed)
        assert code_hash(FOLD) != before, name
