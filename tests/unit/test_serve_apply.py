"""Bringing accepted changes back: all or nothing, only over what was copied, never through a link."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from tests.support.serve_world import changes, directory, file, killed_apply, link, on_disk, tree_of, write_tree

from odradek.infra.serve.apply import STAGING_PREFIX, apply, recover
from odradek.infra.serve.changes import Change
from odradek.infra.serve.errors import ApplyConflict, ApplyFailed, ServeError
from odradek.infra.serve.journal import journal_of
from odradek.infra.serve.snapshot import Node

BEFORE = {
    "kept.py": file("kept\n"),
    "edited.py": file("old\n"),
    "gone.py": file("gone\n"),
    "tool.sh": file("#!/bin/sh\n"),
    "old/one.txt": file("1"),
    "old/two.txt": file("2"),
    "latest": link("old/one.txt"),
    "swap": file("a file"),
    "was/dir/x": file("x"),
}
AFTER = {
    "kept.py": file("kept\n"),
    "edited.py": file("new\n"),
    "tool.sh": file("#!/bin/sh\n", 0o755),
    "new/deep/made.py": file("made\n"),
    "empty": directory(),
    "latest": link("new/deep/made.py"),
    "swap": link("edited.py"),
    "was": file("a file now"),
}


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    write_tree(folder, BEFORE)
    return folder


def test_every_kind_of_change_is_applied(root: Path) -> None:
    apply(root, changes(BEFORE, AFTER))
    expected = {**AFTER, "new": directory(), "new/deep": directory()}
    assert on_disk(root) == expected


def test_nothing_is_written_unless_every_target_still_is_what_was_copied(root: Path) -> None:
    (root / "edited.py").write_text("somebody else's\n")
    (root / "gone.py").unlink()
    (root / "new").write_text("in the way")
    before = on_disk(root)
    with pytest.raises(ApplyConflict) as conflict:
        apply(root, changes(BEFORE, AFTER))
    assert conflict.value.conflicts == [
        "edited.py has changed",
        "gone.py is gone",
        "new exists and was not copied",
    ]
    assert on_disk(root) == before


@pytest.mark.parametrize("made", ["file", "directory", "link"])
def test_what_was_not_copied_is_never_replaced(root: Path, made: str) -> None:
    """A left-out file (.env, an ignored one) stands where the agent made a new one."""
    target = root / ".env"
    if made == "file":
        target.write_text("KEY=1")
    elif made == "directory":
        target.mkdir()
    else:
        target.symlink_to("nowhere")
    before = on_disk(root)
    with pytest.raises(ApplyConflict, match=r"\.env exists and was not copied"):
        apply(root, [Change(".env", None, file("KEY=2")), Change("edited.py", BEFORE["edited.py"], file("x"))])
    assert on_disk(root) == before


def test_a_removed_directory_keeps_what_was_never_copied(root: Path) -> None:
    (root / "old" / "ignored.log").write_text("mine")
    apply(root, changes(BEFORE, {p: n for p, n in BEFORE.items() if not p.startswith("old/")}))
    assert [p.name for p in (root / "old").iterdir()] == ["ignored.log"]


def test_a_file_in_place_of_a_directory_that_holds_more_is_a_conflict(root: Path) -> None:
    (root / "was" / "dir" / "mine").write_text("mine")
    before = on_disk(root)
    with pytest.raises(ApplyConflict, match="was still holds was/dir/mine, which was not copied"):
        apply(root, changes(BEFORE, AFTER))
    assert on_disk(root) == before


@pytest.mark.parametrize("path", ["old/one.txt", "old/new.txt"])
def test_no_component_is_followed_as_a_link(root: Path, tmp_path: Path, path: str) -> None:
    """Since the copy, a directory has become a link to somewhere else."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "one.txt").write_text("1")
    for name in ("one.txt", "two.txt"):
        (root / "old" / name).unlink()
    (root / "old").rmdir()
    (root / "old").symlink_to(outside)
    with pytest.raises(ApplyConflict, match="goes through the symbolic link old"):
        apply(root, [Change(path, BEFORE.get(path), file("changed"))])
    assert {p.name: p.read_text() for p in outside.iterdir()} == {"one.txt": "1"}


def test_a_link_that_appears_between_look_and_step_is_not_followed(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    before = on_disk(root)

    def swap(name: str) -> None:
        if name == "before put old/one.txt":
            (root / "old").rename(root / "aside")
            (root / "old").symlink_to(outside)

    with pytest.raises(ServeError):
        apply(root, changes(BEFORE, {**BEFORE, "old/one.txt": file("changed"), "kept.py": file("changed")}), swap)
    assert list(outside.iterdir()) == []
    (root / "old").unlink()
    (root / "aside").rename(root / "old")
    assert on_disk(root) == before


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "a//b", "./a"])
def test_a_path_that_leads_elsewhere_is_refused(root: Path, path: str) -> None:
    before = on_disk(root)
    with pytest.raises(ApplyConflict, match="not a plain path"):
        apply(root, [Change(path, None, file("x"))])
    assert on_disk(root) == before


def test_an_edit_in_the_last_instant_undoes_everything_and_survives(root: Path) -> None:
    """An editor writes in place after our comparison: the copy that was kept tells."""

    def edit(name: str) -> None:
        if name == "kept kept.py":
            (root / "kept.py").write_text("in the last instant")

    wanted = {**BEFORE, "edited.py": file("new"), "kept.py": file("mine"), "made.py": file("m")}
    with pytest.raises(ApplyConflict, match=r"kept\.py has changed"):
        apply(root, changes(BEFORE, wanted), edit)
    assert on_disk(root) == {**BEFORE_WITH_DIRECTORIES, "kept.py": file("in the last instant")}


BEFORE_WITH_DIRECTORIES: dict[str, Node] = {
    **BEFORE,
    "old": directory(),
    "was": directory(),
    "was/dir": directory(),
}


def test_a_file_that_is_kept_keeps_its_mode(root: Path) -> None:
    """The sandbox knows 0644 and 0755 only; what it did not change stays as the person has it."""
    (root / "edited.py").chmod(0o600)
    apply(root, changes(BEFORE, {**BEFORE, "edited.py": file("new\n")}))
    assert stat.S_IMODE((root / "edited.py").stat().st_mode) == 0o600
    assert (root / "edited.py").read_text() == "new\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_file_that_is_kept_keeps_its_owner(root: Path) -> None:
    os.chown(root / "edited.py", 4321, 4322)
    apply(root, changes(BEFORE, {**BEFORE, "edited.py": file("new\n")}))
    info = (root / "edited.py").stat()
    assert (info.st_uid, info.st_gid) == (4321, 4322)


def test_a_refusal_by_the_host_undoes_everything(root: Path) -> None:
    before = on_disk(root)

    def refuse(name: str) -> None:
        if name == "after put edited.py":
            raise OSError(28, "No space left on device")

    with pytest.raises(ApplyFailed, match="No space left on device; nothing was changed"):
        apply(root, changes(BEFORE, AFTER), refuse)
    assert on_disk(root) == before


def test_a_crash_at_any_point_is_completed_or_undone(tmp_path: Path) -> None:
    """kill -9 at every fault point in turn; then the next run of the same folder recovers."""
    wanted = changes(BEFORE, AFTER)
    after = {**AFTER, "new": directory(), "new/deep": directory()}
    outcomes = []
    for point in range(200):
        root = tmp_path / f"project-{point}"
        root.mkdir()
        write_tree(root, BEFORE)
        died = killed_apply(root, wanted, point)
        if died:
            outcomes.append(recover(root))
            assert on_disk(root) == (BEFORE_WITH_DIRECTORIES if outcomes[-1] == "undone" else after), point
        else:
            assert on_disk(root) == after
            break
        assert recover(root) == "nothing"
    assert outcomes[:2] == ["undone", "undone"]
    assert outcomes.count("completed") > len(wanted)
    assert outcomes[-1] == "nothing"


def test_a_crash_after_which_somebody_edited_is_undone_around_the_edit(root: Path) -> None:
    """Neither before nor after: what can't be completed is undone, the edit stays."""
    names: list[str] = []
    apply_names(root, names)
    write_tree_again(root)
    assert killed_apply(root, changes(BEFORE, AFTER), names.index("before put edited.py"))
    (root / "edited.py").write_text("edited after the crash")
    assert recover(root) == "undone"
    assert on_disk(root) == {**BEFORE_WITH_DIRECTORIES, "edited.py": file("edited after the crash")}


def test_a_crash_in_recovery_is_recovered_too(tmp_path: Path) -> None:
    wanted = changes(BEFORE, AFTER)
    after = {**AFTER, "new": directory(), "new/deep": directory()}
    for point in range(200):
        root = tmp_path / f"project-{point}"
        root.mkdir()
        write_tree(root, BEFORE)
        assert killed_apply(root, wanted, 8)
        if not killed_recovery(root, point):
            break
        recover(root)
        assert on_disk(root) == after, point
    assert point > len(wanted)


def test_changes_are_not_applied_over_an_unfinished_application(root: Path) -> None:
    assert killed_apply(root, changes(BEFORE, AFTER), 5)
    with pytest.raises(ServeError, match="interrupted"):
        apply(root, changes(BEFORE, AFTER))


def test_two_at_once_wait_for_each_other(root: Path) -> None:
    """The second finds the folder changed by the first, whole, and changes nothing."""
    inside, release = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "journal ready":
            inside.set()
            assert release.wait(10)

    first = threading.Thread(target=apply, args=(root, changes(BEFORE, AFTER), hold))
    first.start()
    assert inside.wait(10)
    with pytest.raises(ServeError, match="another odradek"), journal_of(root, wait_s=0.1):
        pass
    release.set()
    first.join(10)
    with pytest.raises(ApplyConflict):
        apply(root, changes(BEFORE, AFTER))


def test_a_journal_inside_the_folder_means_nothing(root: Path) -> None:
    """A folder that somebody else wrote can't make us act."""
    staging = root / f"{STAGING_PREFIX}00000000"
    staging.mkdir()
    (staging / "journal.json").write_text("{}")
    assert recover(root) == "nothing"
    assert staging.is_dir()


def test_an_unchanged_tree_touches_nothing(root: Path) -> None:
    times = {p: p.lstat().st_mtime_ns for p in root.rglob("*")}
    apply(root, changes(BEFORE, BEFORE))
    assert {p: p.lstat().st_mtime_ns for p in root.rglob("*")} == times


# -- helpers ----------------------------------------------------------------------------------------------------------


def apply_names(root: Path, names: list[str]) -> None:
    apply(root, changes(BEFORE, AFTER), names.append)


def write_tree_again(root: Path) -> None:
    import shutil

    shutil.rmtree(root)
    root.mkdir()
    write_tree(root, BEFORE)


def killed_recovery(root: Path, point: int) -> bool:
    from tests.support.serve_world import in_child

    return in_child(lambda fault: recover(root, fault) and None, point) == point


def test_the_helper_trees_are_plain(root: Path) -> None:
    """Guards the other tests: what was written is what is compared."""
    assert on_disk(root) == BEFORE_WITH_DIRECTORIES
    assert tree_of({"a": "b"}) == {"a": file("b")}
