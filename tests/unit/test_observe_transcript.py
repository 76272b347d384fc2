"""A session read back from its records: what it said, called, got and changed."""

from __future__ import annotations

import msgspec
from support.folded import folded
from support.run_log import RunLog, small_run
from support.session_world import template

from odradek.infra.cli.session import listed, table
from odradek.infra.observe.transcript import Transcript, as_text, transcript
from odradek.streams.events.sessions import FileChange, SessionOpened, ToolCompleted, WorkspaceDelta
from odradek.streams.ownership import SessionRecord

BEFORE = {"shop/total.py": b"def total(xs):\n    return max(xs)\n"}
ANY = {"origin": None, "group_id": None, "task_id": None, "end": None}


def records(log: RunLog, session: str) -> list[SessionRecord]:
    return [
        (r.ref.offset, r.event.id, r.event.meta, r.event.body) for r in log.of("sessions.v1") if r.key == session
    ]  # fmt: skip


def one(session: str = "group-012-s3", files: dict[str, bytes] | None = None) -> Transcript:
    log = small_run()
    fold, _ = folded(log)
    files = BEFORE if files is None else files
    found = transcript(session, 3, records(log, session), files, template(), fold.verdicts.get(session))
    assert found is not None
    return found


def test_turns_calls_results_and_diffs_are_readable() -> None:
    text = as_text(one())
    for part in (
        "user:\n  fix test_total",
        "→ read_file(path='shop/total.py')",
        "2     return max(xs)",
        "→ edit_file(path='shop/total.py', old='max', new='sum')",
        "    -    return max(xs)\n    +    return sum(xs)",
        "sampled (15 under version 0)",
        "[done]",
        "completed: done",
        "reward 0.97",
    ):
        assert part in text, part


def test_a_file_whose_start_is_not_known_is_shown_as_new() -> None:
    diff = next(entry.diffs[0] for entry in one(files={}).entries if entry.diffs)
    assert diff.startswith("--- /dev/null\n+++ b/shop/total.py\n")


def test_deleted_files_links_and_large_files_have_a_line_each() -> None:
    log = small_run(versions=1)
    session = "group-012-s0"
    found = records(log, session)
    at = next(i for i, r in enumerate(found) if isinstance(r[3], ToolCompleted) and r[3].delta is not None)
    body = found[at][3]
    assert isinstance(body, ToolCompleted)
    changes = [
        FileChange(path="shop/total.py", kind="delete"),
        FileChange(path="link", kind="symlink", content=b"shop/total.py"),
        FileChange(path="folder", kind="dir"),
        FileChange(path="gone", kind="delete"),
    ]
    found[at] = (*found[at][:3], msgspec.structs.replace(body, delta=WorkspaceDelta(changes=changes)))
    made = transcript(session, 0, found, BEFORE, template())
    assert made is not None
    diffs = next(entry.diffs for entry in made.entries if entry.diffs)
    assert diffs == [
        "--- a/shop/total.py\n+++ /dev/null\n(deleted, 34 bytes)\n",
        "link: symlink shop/total.py\n",
        "folder: dir\n",
        "deleted: gone\n",
    ]


def test_a_session_of_another_tokenizer_shows_counts_and_no_invented_text() -> None:
    log = small_run(versions=1)
    made = transcript("group-012-s0", 0, records(log, "group-012-s0"), BEFORE, None)
    assert made is not None
    assert [entry.text for entry in made.entries if entry.kind == "turn"] == ["", "", ""]
    assert all(entry.sampled_tokens for entry in made.entries if entry.kind == "turn")


def test_records_of_a_former_owner_are_counted_and_not_shown() -> None:
    log = small_run(versions=1)
    found = records(log, "group-012-s0")
    made = transcript("group-012-s0", 0, [*found, *found[2:4]], BEFORE, template())
    assert made is not None
    assert (made.ignored, len(made.entries)) == (2, len(found))
    assert "2 records of former owners" in as_text(made)


def test_whose_session_it_is_is_shown_as_erase_wants_it() -> None:
    found = records(small_run(versions=1), "group-012-s0")
    assert "subject" not in as_text(one())
    theirs = [(at, name, msgspec.structs.replace(meta, subject="carol"), body) for at, name, meta, body in found]
    made = transcript("group-012-s0", 0, theirs, BEFORE, template())
    assert made is not None and made.subject == "carol"
    assert "subject carol" in as_text(made)


def test_without_an_opening_there_is_no_session() -> None:
    found = [r for r in records(small_run(versions=1), "group-012-s0") if not isinstance(r[3], SessionOpened)]
    assert transcript("group-012-s0", 0, found, {}, template()) is None


def test_the_json_form_round_trips() -> None:
    found = one()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Transcript) == found


def test_sessions_are_listed_with_their_end_and_reward_and_filtered() -> None:
    fold, book = folded(small_run())
    rows = listed(book, fold, ANY)
    assert len(rows) == len(book.sessions)
    assert [row.opened for row in rows] == sorted(row.opened for row in rows)
    rl = listed(book, fold, {**ANY, "origin": "rl"})
    assert len(rl) == 48 and {row.origin for row in rl} == {"rl"}
    assert [row.session_id for row in listed(book, fold, {**ANY, "group_id": "group-012"})] == [
        f"group-012-s{i}" for i in range(4)
    ]
    assert listed(book, fold, {**ANY, "end": "open"}) == []
    shown = table(rl[:4]).splitlines()
    assert len(shown) == 5 and shown[0].split()[:3] == ["session", "origin", "task"]
    assert rl[3].solved is True and "0.97 solved" in shown[4]
    assert table([]) == "no session on the log matches"
