"""No name or text from outside reaches a terminal or a page with a control character in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.folded import folded
from support.run_log import START_MS, small_run
from tests.support.serve_world import file, write_tree

from odradek.infra.cli.context import CaseFailed, Context, report_failure
from odradek.infra.cli.session import Listed, table
from odradek.infra.config.load import load
from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.frame import frame
from odradek.infra.observe.report import render
from odradek.infra.observe.screen import as_text
from odradek.infra.serve import job
from odradek.infra.serve.changes import Change, as_diff
from odradek.infra.serve.screen import Screen
from odradek.infra.serve.view import Line

NAME = "a\n+b\x1b[2J\x00\x9b\u202ec"
"""A name that starts a line of its own, clears the screen and turns the rest around."""
SHOWN = r"a\n+b\x1b[2J\x00\x9b\u202ec"


def harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_a_commands_answer_progress_and_error_have_no_control_character(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    context = Context(load(data=tmp_path), as_json=False)
    context.result(None, f"task {NAME}")
    context.say(f"reading {NAME}")
    report_failure(CaseFailed(f"no task {NAME}"), as_json=False)
    out, err = capsys.readouterr()
    assert r"\x1b[2J\x00" in out and err.count(r"\x1b[2J\x00") == 2
    assert harmless(out) and harmless(err)


def test_a_file_name_is_one_line_of_what_was_left_out_and_of_the_diff(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = NAME.replace("\x00", "")
    shown = SHOWN.replace(r"\x00", "")
    write_tree(tmp_path, {f"{name}.pem": file("k"), "main.py": file("m")})
    lines = job.about(job.copy(tmp_path))
    assert [line.text for line in lines[1:]] == [f"left out {shown}.pem: may hold a secret"]
    diff = as_diff([Change(name, None, file("x\n")), Change("main.py", file("m"), None)])
    assert f"+++ b/{shown}\n" in diff and harmless(diff)
    Screen(to_stderr=False).show([Line("note", f"the session {NAME}")])
    assert harmless(capsys.readouterr().out)


def test_a_task_id_is_one_cell_of_the_list_of_sessions() -> None:
    row = Listed(
        session_id="s", origin="rl", group_id="g", task_id=NAME, subject="", attempt=0, opened="", versions=[],
        end="done", turns=1, calls=1, sampled_tokens=1, reward=None, solved=None,
    )  # fmt: skip
    assert table([row]).count("\n") == 1 and SHOWN in table([row])


def test_what_actors_say_and_the_page_have_no_control_character() -> None:
    log = small_run()
    fold, book = folded(log)
    view = ActorView("session-0", True, None, {"oldest_wait_s": 41.0, "oldest_wait_for": NAME})
    text = as_text(frame(fold, book, [view], log.now_ms), width=140)
    assert SHOWN in text and harmless(text)
    (version, _), conduct = fold.evaluations.popitem()
    fold.evaluations[version, NAME] = conduct
    fold.ungraded[NAME] += 1
    assert harmless(render(fold, book, START_MS))
