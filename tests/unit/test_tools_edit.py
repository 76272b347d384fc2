"""edit_file and write_file: literal text, and every byte that was not edited stays."""

import os
from pathlib import Path

import pytest
from support.local_workspace import LocalWorkspace
from unidiff.patch import PatchSet

from odradek.actors.tools.diff import COMPARED_LINES, unified
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import run_call
from odradek.actors.tools.spec import ToolOutcome


@pytest.fixture
def workspace(tmp_path: Path) -> LocalWorkspace:
    return LocalWorkspace(tmp_path)


async def call(workspace: LocalWorkspace, name: str, /, **arguments: str) -> ToolOutcome:
    return await run_call(workspace, name, arguments, Limits())


async def edit(workspace: LocalWorkspace, old: str, new: str, path: str = "f") -> ToolOutcome:
    return await call(workspace, "edit_file", path=path, old=old, new=new)


def apply_diff(before: str, diff: str) -> str:
    """What the diff makes of `before`, line by line: the independent reading of it."""
    lines, out, at = before.split("\n"), list[str](), 0
    (patched,) = PatchSet(diff)
    for hunk in patched:
        start = hunk.source_start - (1 if hunk.source_length else 0)
        out += lines[at:start]
        at = start
        for line in hunk:
            if line.is_removed or line.is_context:
                assert line.value.rstrip("\n") == lines[at]
                at += 1
            if line.is_added or line.is_context:
                out.append(line.value.rstrip("\n"))
    return "\n".join(out + lines[at:])


async def test_case_opencode_45892_replacement_text_is_literal_and_the_diff_shows_what_is_on_disk(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    """opencode #45892: group marks in the replacement are expanded, and success is reported."""
    before = "a = 1\ncost = 3\nb = 2\n"
    (tmp_path / "f").write_text(before)
    outcome = await edit(workspace, "cost = 3", r'cost="$& $1 \1 \g<0> \n"')
    after = "a = 1\n" + r'cost="$& $1 \1 \g<0> \n"' + "\nb = 2\n"
    assert outcome.text == "ok"
    assert (tmp_path / "f").read_text() == after
    assert outcome.display is not None
    assert apply_diff(before, outcome.display.body) == after


async def test_quoted_text_is_literal_too(tmp_path: Path, workspace: LocalWorkspace) -> None:
    (tmp_path / "f").write_text("x = [a-z]+(.*)\nx = abc\n")
    assert (await edit(workspace, "[a-z]+(.*)", "y")).text == "ok"
    assert (tmp_path / "f").read_text() == "x = y\nx = abc\n"


async def test_case_anthropic_1195_in_a_latin_1_file_only_the_edited_line_changes(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    """anthropic-sdk-typescript PR 1195: an ASCII edit turns unrelated bytes into replacement characters."""
    (tmp_path / "f").write_bytes(b"# caf\xe9\nn = 1\n")
    assert (await edit(workspace, "n = 1", "n = 2")).text == "ok"
    assert (tmp_path / "f").read_bytes() == b"# caf\xe9\nn = 2\n"


async def test_a_latin_1_line_can_be_quoted_as_shown_and_stays_latin_1(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    (tmp_path / "f").write_bytes(b"# caf\xe9\nn = 1\n")
    shown = (await call(workspace, "read_file", path="f")).text
    assert shown == "# café\nn = 1\n"
    assert (await edit(workspace, "# café\n", "# un café très bon\n")).text == "ok"
    assert (tmp_path / "f").read_bytes() == b"# un caf\xe9 tr\xe8s bon\nn = 1\n"


async def test_what_latin_1_lacks_is_refused_without_a_write(tmp_path: Path, workspace: LocalWorkspace) -> None:
    (tmp_path / "f").write_bytes(b"# caf\xe9\n")
    outcome = await edit(workspace, "# caf", "# 漢")
    assert outcome.text == "error: new has '漢', which f can't hold as latin-1; nothing changed"
    assert (tmp_path / "f").read_bytes() == b"# caf\xe9\n"


async def test_a_stray_byte_in_a_utf_8_file_survives_an_edit_of_its_own_line(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    (tmp_path / "f").write_bytes("# ø→漢 ".encode() + b"\xe9 end\n")
    assert (await edit(workspace, "# ø→漢 é end", "# ø→漢 é END ü")).text == "ok"
    assert (tmp_path / "f").read_bytes() == "# ø→漢 ".encode() + b"\xe9 END " + "ü\n".encode()


@pytest.mark.parametrize("quote_crlf", [False, True])
async def test_case_codewhale_4764_bom_crlf_and_missing_last_newline_are_kept(
    tmp_path: Path, workspace: LocalWorkspace, quote_crlf: bool
) -> None:
    """Codewhale #4764, hermes-agent PR 35278: text copied from read_file does not match; the BOM is dropped."""
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\nthree")
    shown = (await call(workspace, "read_file", path="f", limit="2")).text
    quoted = "".join(shown.splitlines(keepends=True)[:2])
    new = quoted.replace("one", "1").replace("two", "2\r\n2b" if quote_crlf else "2\n2b")
    if not quote_crlf:
        quoted, new = (text.replace("\r\n", "\n").removeprefix("\ufeff") for text in (quoted, new))
    assert (await edit(workspace, quoted, new)).text == "ok"
    assert (tmp_path / "f").read_bytes() == b"\xef\xbb\xbf1\r\n2\r\n2b\r\nthree"


async def test_mixed_line_ends_stay_mixed(tmp_path: Path, workspace: LocalWorkspace) -> None:
    (tmp_path / "f").write_bytes(b"a\r\nb\nc\r\nd\n")
    assert (await edit(workspace, "b\nc\nd", "b\nC\nd")).text == "ok"
    assert (tmp_path / "f").read_bytes() == b"a\r\nb\nC\r\nd\n"


@pytest.mark.parametrize(
    ("content", "old", "new", "text"),
    [
        ("a\nb\n", "a", "a", "error: old and new are the same"),
        ("a\nb\n", "", "x", "error: old is empty; quote the text to replace, or use write_file"),
        ("aa\nba\n", "a", "x", "error: old text found 3 times; quote more of it"),
        ("aaa\n", "aa", "x", "error: old text found 2 times; quote more of it"),
        ("", "a", "x", "error: old text found 0 times; f is empty"),
        (
            "def total(a, b):\n    return a + b\n\ndef mean(v):\n",
            "    return a+b",
            "x",
            "error: old text found 0 times; nearest line 2:     return a + b",
        ),
        (
            "def total(a, b):\n    x = a\n    return x + b\n",
            "def total(a, b):\n    x = a\n    return x+b\n",
            "x",
            "error: old text found 0 times; nearest line 3:     return x + b",
        ),
    ],
)
async def test_an_edit_that_fails_says_what_would_help(
    tmp_path: Path, workspace: LocalWorkspace, content: str, old: str, new: str, text: str
) -> None:
    (tmp_path / "f").write_text(content)
    outcome = await edit(workspace, old, new)
    assert (outcome.text, outcome.is_error) == (text, True)
    assert (tmp_path / "f").read_text() == content


async def test_a_failed_edit_of_a_huge_file_answers_with_a_bounded_line(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    lines = [f"line number {n} of many" for n in range(30_000)] + ["x" * 1_000_000, "the unique needle stands here"]
    (tmp_path / "f").write_text("\n".join(lines))
    outcome = await edit(workspace, "the unique needles stand here", "x")
    assert outcome.text == "error: old text found 0 times; nearest line 30002: the unique needle stands here"
    (tmp_path / "f").write_text("x" * 1_000_000)
    assert len((await edit(workspace, "y", "z")).text) < 600


async def test_text_with_a_redaction_mark_is_not_written_over_the_secret(
    tmp_path: Path, workspace: LocalWorkspace
) -> None:
    content = "USER=me\nDB_PASSWORD=hunter2\nPORT=1\n"
    (tmp_path / "f").write_text(content)
    shown = (await call(workspace, "read_file", path="f")).text
    assert "hunter2" not in shown
    assert (await call(workspace, "write_file", path="f", content=shown.replace("PORT=1", "PORT=2"))).is_error
    assert "quote only what is around it" in (await edit(workspace, shown, "x")).text
    assert (tmp_path / "f").read_text() == content
    outcome = await edit(workspace, "PORT=1", "PORT=2")
    assert (tmp_path / "f").read_text() == content.replace("PORT=1", "PORT=2")
    assert outcome.display is not None
    assert "hunter2" not in outcome.display.body


async def test_write_file_writes_exactly_the_content(tmp_path: Path, workspace: LocalWorkspace) -> None:
    content = "\ufeffa\r\nb\x0c\u2028c"
    outcome = await call(workspace, "write_file", path="deep/er/f", content=content)
    assert outcome.text == "ok"
    assert (tmp_path / "deep/er/f").read_bytes() == content.encode()
    assert os.listdir(f"{tmp_path}/deep/er") == ["f"]  # noqa: PTH208


async def test_half_a_character_is_refused(tmp_path: Path, workspace: LocalWorkspace) -> None:
    assert (await call(workspace, "write_file", path="f", content="\ud800")).is_error
    assert (await call(workspace, "write_file", path="\ud800", content="x")).is_error
    (tmp_path / "f").write_text("x")
    assert (await edit(workspace, "x", "\ud800")).is_error
    assert os.listdir(str(tmp_path)) == ["f"]  # noqa: PTH208


def test_the_diff_of_a_new_file_and_of_a_large_change() -> None:
    assert unified("f", None, b"a\nb") == (
        "--- /dev/null\n+++ b/f\n@@ -0,0 +1,2 @@\n+a\n+b\n\\ No newline at end of file\n"
    )
    before = "".join(f"old {n}\n" for n in range(COMPARED_LINES))
    after = "".join(f"new {n}\n" for n in range(COMPARED_LINES))
    assert apply_diff(before, unified("f", before.encode(), after.encode())) == after


def test_equal_contents_have_no_diff() -> None:
    assert unified("f", b"a\nb\n", b"a\nb\n") == ""
