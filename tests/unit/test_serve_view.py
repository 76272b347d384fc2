"""What a person reads of a session, and what is asked at its end."""

from __future__ import annotations

from tests.support.serve_world import compared, directory, file, link
from tests.support.session_world import template

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.infra.serve.changes import Change, as_diff, compare, fold, with_directories
from odradek.infra.serve.select import BY_PRODUCTS
from odradek.infra.serve.view import OUTPUT_LINES, Line, View
from odradek.infra.shown import clean
from odradek.streams.codec import f32, i32
from odradek.streams.events.sessions import (
    EnvironmentOpened,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    SessionResumed,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
    Usage,
)

COPIED = {"a.py": file("one\ntwo\n"), "b.bin": file("x\0y")}


def _view() -> View:
    return View(template(), COPIED)


def _call(
    view: View, name: str, text: str, *, error: bool = False, delta: Delta | None = None, **given: str
) -> list[Line]:
    """The lines of one call, requested and completed."""
    lines = view.tell(
        ToolRequested(call_id="0.0", turn=0, index=0, name=name, arguments=given, effect="pure"),
    )
    result = ToolCompleted(call_id="0.0", turn=0, index=0, text=text, is_error=error)
    return lines + view.tell(result, delta)


def _entry(path: str, content: str) -> Delta:
    return Delta((DeltaEntry(path=path, kind="file", mode=0o644, content=content.encode()),))


def _text(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_reads_are_one_line_each() -> None:
    view = _view()
    assert _call(view, "read_file", "1 one\n2 two\n", path="a.py") == [Line("note", "read a.py (2 lines)")]
    assert _call(view, "grep", "a.py:1: one\n", pattern="on.") == [Line("note", "searched for on. (1 line)")]
    assert _call(view, "glob", "no match", pattern="*.c") == [Line("note", "looked for *.c (0 lines)")]
    assert _call(view, "list_dir", "a.py\nb.bin\n") == [Line("note", "listed . (2 lines)")]


def test_an_edit_is_its_unified_diff() -> None:
    lines = _call(_view(), "edit_file", "ok", delta=_entry("a.py", "one\n2\n"), path="a.py", old="two", new="2")
    assert _text(lines) == [
        "edited a.py",
        "diff a.py",
        "--- a/a.py",
        "+++ b/a.py",
        "@@ -1,2 +1,2 @@",
        " one",
        "-two",
        "+2",
    ]
    assert [line.style for line in lines[4:]] == ["hunk", "text", "remove", "add"]


def test_the_second_edit_is_shown_against_the_first() -> None:
    view = _view()
    _call(view, "edit_file", "ok", delta=_entry("a.py", "1\ntwo\n"), path="a.py")
    assert _text(_call(view, "edit_file", "ok", delta=_entry("a.py", "1\n2\n"), path="a.py"))[-2:] == ["-two", "+2"]


def test_a_command_is_shown_when_it_starts_and_its_output_when_it_ends() -> None:
    view = _view()
    request = ToolRequested(
        call_id="0.0", turn=0, index=0, name="run_terminal", arguments={"command": "python test.py"}, effect="workspace"
    )
    assert view.tell(request) == [Line("command", "$ python test.py")]
    assert view.waiting_for == "$ python test.py"
    result = ToolCompleted(call_id="0.0", turn=0, index=0, text="1 failed\n[exit 1]\n")
    assert view.tell(result, _entry("made.txt", "m\n")) == [
        Line("output", "  1 failed"),
        Line("output", "  [exit 1]"),
        Line("head", "diff made.txt"),
        Line("text", "new file"),
        Line("head", "--- /dev/null"),
        Line("head", "+++ b/made.txt"),
        Line("hunk", "@@ -0,0 +1,1 @@"),
        Line("add", "+m"),
    ]
    assert view.waiting_for == "the model"


def test_long_output_keeps_its_beginning_and_end() -> None:
    lines = _call(_view(), "run_terminal", "\n".join(str(n) for n in range(1000)), command="seq 1000")
    assert len(lines) == 1 + OUTPUT_LINES + 1
    assert _text(lines)[1] == "  0"
    assert _text(lines)[-1] == "  999"
    assert f"… {1000 - OUTPUT_LINES} more lines …" in _text(lines)[1 + OUTPUT_LINES // 2]


def test_parallel_calls_are_waited_for_until_the_last_one() -> None:
    view = _view()
    for index in (0, 1):
        view.tell(
            ToolRequested(
                call_id=f"0.{index}", turn=0, index=index, name="read_file", arguments={"path": "a.py"}, effect="pure"
            )
        )
    view.tell(ToolCompleted(call_id="0.0", turn=0, index=0, text="x"))
    assert view.waiting_for == "read_file"
    view.tell(ToolCompleted(call_id="0.1", turn=0, index=1, text="x"))
    assert view.waiting_for == "the model"


def test_a_failed_call_shows_its_reason() -> None:
    lines = _call(_view(), "read_file", "error: no such file x\nmore", error=True, path="x")
    assert lines == [Line("error", "read_file x: error: no such file x")]
    assert _call(_view(), "", "error: <arg:path> outside a call", error=True)[0].style == "error"


def test_model_text_and_milestones() -> None:
    view = _view()
    tokens = template().turn([], text="I look\nat it", done=True)
    turn = TurnSampled(
        turn=0,
        position=0,
        prompt=i32([]),
        completion=i32(tokens),
        logprobs=f32([0.0] * len(tokens)),
        spans=[],
        numerics_id="t",
        finish_reason="stop",
    )
    usage = Usage(turns=1, calls=2)
    told: list[tuple[SessionEvent, list[str]]] = [
        (MessageReceived(message_id="0", text="fix it\na.py"), ["> fix it", "> a.py"]),
        (turn, ["I look", "at it"]),
        (EnvironmentOpened(sandbox_id="s", driver="ns", image_digest="d"), []),
        (
            EnvironmentOpened(sandbox_id="s", driver="ns", image_digest="d", rebuilt=True),
            ["the workspace was rebuilt from the log; what ran in the background is gone"],
        ),
        (SessionResumed(session_id="s"), ["a failure of ours: the session goes on from its last logged step"]),
        (
            SessionCompleted(reason="turns", first_offset=0, usage=usage),
            ["the budget of turns is used up (1 turn, 2 calls)"],
        ),
        (SessionFailed(cause="no engine", first_offset=0), ["the session failed on our side: no engine"]),
        (SessionFailed(cause="", first_offset=0), ["the session has ended: its subject was erased"]),
    ]
    for event, expected in told:
        assert _text(view.tell(event)) == expected


def test_no_text_can_move_the_cursor_or_hide_what_follows() -> None:
    """Escape sequences, carriage returns, backspaces and direction marks are written out."""
    nasty = "a\x1b[2Kb\rc\x08d\u202ee\x9bf\r\n\tg"
    assert clean(nasty) == "a\\x1b[2Kb\\x0dc\\x08d\\x202ee\\x9bf\n\tg"
    view = _view()
    lines = _call(view, "run_terminal", nasty, command="printf '\x1b[1A'")
    lines += _call(view, "write_file", "ok", delta=_entry("n\x1b.py", "x\x1b[0m\n"), path="n\x1b.py")
    lines += _call(view, "\x1b]0;t\x07", "error: \x1b", error=True)
    lines += view.tell(SessionFailed(cause="\x1b[31m", first_offset=0))
    assert not any(ord(c) < 32 and c != "\t" for line in lines for c in line.text)


# -- the diff that is asked about -------------------------------------------------------------------------------------


def test_the_diff_says_what_accepting_would_do() -> None:
    before = {
        "gone.py": file("bye\n"),
        "program": file("#!\n"),
        "l": link("a"),
        "kind": file("text\n"),
        "b.bin": file("x\0"),
        "d/x": file("x\n"),
    }
    after = {
        "program": file("#!\n", 0o755),
        "l": link("b"),
        "kind": link("d"),
        "b.bin": file("x\0y"),
        "new.py": file("hi"),
        "tool": file("t\n", 0o755),
        "empty": directory(),
    }
    assert as_diff(compared(before, after).changes) == (
        "diff b.bin\nbinary, 2 bytes becomes 3 bytes\n"
        "remove directory d\n"
        "diff d/x\ndeleted\n--- a/d/x\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n"
        "make directory empty\n"
        "diff gone.py\ndeleted\n--- a/gone.py\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-bye\n"
        "diff kind\nfile becomes symbolic link\n--- a/kind\n+++ b/kind\n@@ -1,1 +1,1 @@\n-text\n+d\n"
        "\\ No newline at end of file\n"
        "diff l\n--- a/l\n+++ b/l\n@@ -1,1 +1,1 @@\n-a\n\\ No newline at end of file\n+b\n"
        "\\ No newline at end of file\n"
        "diff new.py\nnew file\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1,1 @@\n+hi\n\\ No newline at end of file\n"
        "diff program\nmode 0644 becomes 0755\n"
        "diff tool\nnew program\n--- /dev/null\n+++ b/tool\n@@ -0,0 +1,1 @@\n+t\n"
    )


def test_nothing_inside_a_git_folder_is_ever_brought_back() -> None:
    """A hook there would run on the person's machine."""
    after = {"a.py": file("x"), ".git/hooks/pre-commit": file("#!/bin/sh", 0o755), "sub/.GIT/config": file("c")}
    found = compared({"a.py": file("y")}, after)
    assert [change.path for change in found.changes] == ["a.py", "sub"]
    assert found.refused == [".git", ".git/hooks", ".git/hooks/pre-commit", "sub/.GIT", "sub/.GIT/config"]


def test_by_products_are_set_aside_unless_they_were_copied() -> None:
    def ignored(paths: object) -> set[str]:
        return set(BY_PRODUCTS.match_files(paths))  # type: ignore[arg-type]

    before = {"a.py": file("a"), "kept/__pycache__/x.pyc": file("copied")}
    after = {"a.py": file("a"), "kept/__pycache__/x.pyc": file("edited"), "__pycache__/a.pyc": file("new")}
    found = compare(before, with_directories(after), ignored)
    assert found.changes == [Change("kept/__pycache__/x.pyc", file("copied"), file("edited"))]
    assert found.by_products == ["__pycache__", "__pycache__/a.pyc"]


def test_the_workspace_is_a_fold_of_its_deltas() -> None:
    deltas = [
        Delta((DeltaEntry(path="d", kind="dir", mode=0o755), DeltaEntry(path="d/x", kind="file", content=b"1"))),
        Delta((DeltaEntry(path="a.py", kind="delete"), DeltaEntry(path="l", kind="symlink", target="d/x"))),
        Delta((DeltaEntry(path="d", kind="file", mode=0o644, content=b"now a file"),)),
    ]
    assert fold(COPIED, deltas) == {
        "b.bin": file("x\0y"),
        "d": file("now a file"),
        "l": link("d/x"),
    }
