"""Laws of the tools over generated input."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.beneath import Beneath

from odradek.actors.tools.diff import unified
from odradek.actors.tools.edit_file import replace_once
from odradek.actors.tools.errors import NoMatch, ToolError
from odradek.actors.tools.redact import MARK, redact
from odradek.actors.tools.text import decode, split_lines, utf8_prefix, utf8_suffix
from odradek.actors.tools.todo_write import TodoItem, with_ids

PLAIN = st.text(alphabet=st.sampled_from("ab \n\t$\\1é→漢&"), max_size=40)
FILE_BYTES = st.lists(
    st.sampled_from([b"a", b"b", b" ", b"\n", b"\r\n", b"\r", b"\xe9", b"\xff", "é→".encode(), b"\xef\xbb\xbf", b"\\1"])
).map(b"".join)


@settings(deadline=None)
@given(PLAIN, PLAIN, PLAIN, PLAIN)
def test_an_edit_of_plain_text_is_bytes_replace(before: str, old: str, new: str, after: str) -> None:
    content = before + old + after
    if not old or old == new or content.find(old) != len(before) or content.find(old, len(before) + 1) >= 0:
        return
    expected = content.encode().replace(old.encode(), new.encode())
    assert replace_once(content.encode(), old, new, "f", 100) == expected


@settings(deadline=None)
@given(FILE_BYTES, st.data())
def test_an_edit_of_any_bytes_leaves_every_byte_around_the_quote(content: bytes, data: st.DataObject) -> None:
    """The quote is any piece of what read_file shows, with its own line ends or with plain ones."""
    shown = decode(content)
    start = data.draw(st.integers(0, len(shown)))
    stop = data.draw(st.integers(start, len(shown)))
    old = shown[start:stop]
    if data.draw(st.booleans()):
        old = old.replace("\r\n", "\n").removeprefix("\ufeff")
    try:
        result = replace_once(content, old, "Z", "f", 100)
    except NoMatch:
        return
    assert result.count(b"Z") == 1
    left, _, right = result.partition(b"Z")
    assert content.startswith(left)
    assert content.endswith(right)
    gone = content[len(left) : len(content) - len(right)]
    assert decode(gone).replace("\r\n", "\n").removeprefix("\ufeff") == old.replace("\r\n", "\n").removeprefix("\ufeff")


@settings(deadline=None)
@given(FILE_BYTES, st.data())
def test_the_edit_there_and_back_gives_the_file_again(content: bytes, data: st.DataObject) -> None:
    lines = split_lines(decode(content).removeprefix("\ufeff"))
    if not lines:
        return
    old = data.draw(st.sampled_from(lines)).rstrip("\r\n")
    if not old.isascii():  # once its only such character is gone, nothing tells how the file wrote it
        return
    try:
        changed = replace_once(content, old, "ZYX", "f", 100)
    except NoMatch:
        return
    assert replace_once(changed, "ZYX", old, "f", 100) == content


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a\n", "b\n", "c\n", "d"]), max_size=30), st.lists(st.sampled_from(["a\n", "b\n", "e"]))
)
def test_the_diff_turns_the_old_text_into_the_new(old: list[str], new: list[str]) -> None:
    before, after = "".join(old), "".join(new)
    lines, out, at = split_lines(before), list[str](), 0
    previous = ""
    body = split_lines(unified("f", before.encode(), after.encode()))[2:]
    for line in body:
        if line.startswith("@@"):
            first, _, length = line.split()[1][1:].partition(",")
            start = int(first) - (1 if int(length) else 0)
            out += lines[at:start]
            at = start
        elif line.startswith("\\"):
            if previous != "-":
                out[-1] = out[-1].removesuffix("\n")
        else:
            if line[0] in " -":
                assert line[1:].removesuffix("\n") == lines[at].removesuffix("\n")
                at += 1
            if line[0] in " +":
                out.append(line[1:])
        previous = line[0]
    assert "".join(out + lines[at:]) == after


PATHS = st.lists(
    st.sampled_from(
        ["..", ".", "", "d", "f", "out", "up", "in", "deep", "new", "abs", "loop", "gone", "~", "outside.txt"]
    ),
    min_size=1,
    max_size=8,
).map("/".join)


@pytest.fixture(scope="module")
def tree() -> object:
    """A workspace with links of every kind beside a directory that must never change."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(os.path.realpath(name))
        root = base / "root"
        (root / "d" / "deep").mkdir(parents=True)
        (root / "f").write_text("inside")
        (base / "outside.txt").write_text("outside")
        for link, target in [
            ("out", "../outside.txt"),
            ("up", ".."),
            ("in", "f"),
            ("d/deep/up", "../../.."),
            ("abs", str(base / "outside.txt")),
            ("loop", "loop"),
            ("gone", "../created.txt"),
            ("d/in", str(root / "f")),
        ]:
            (root / link).symlink_to(target)
        yield base


@settings(max_examples=400, deadline=None)
@given(path=PATHS, prefix=st.sampled_from(["", "/", "ROOT/", "../root/", "ROOT/../"]))
def test_no_path_leaves_the_workspace(tree: Path, path: str, prefix: str) -> None:
    root = tree / "root"
    files = Beneath(str(root), str(root))
    path = prefix.replace("ROOT", str(root)) + path
    for attempt in (
        lambda: files.read(path, 100),
        lambda: files.write(path, b"written", None),
        lambda: files.list(path),
        lambda: files.stat(path),
    ):
        try:
            answer = attempt()
        except ToolError:
            continue
        assert answer != b"outside"
        if isinstance(answer, list):
            assert "root" not in [entry.name for entry in answer]
    assert (tree / "outside.txt").read_text() == "outside"
    assert sorted(p.name for p in tree.iterdir()) == ["outside.txt", "root"]


PIECES = st.sampled_from(
    [
        *("DB_PASSWORD=", "hunter2", "ghp_" + "aB3" * 12, "AKIA" + "A" * 16, "\n", " ", '"', "'", ":", "=", "token"),
        *("-----BEGIN PRIVATE" + " KEY-----", "-----END PRIVATE" + " KEY-----", "MIIEpAIBAAKCAQEA", "api_key"),
        *("[redacted:KEY]", "[redacted:", "]", "eyJhbGciOiJI.eyJzdWIiOiIx.x", "://u:p@h", "Bearer "),
        *("q7Rk2ZpXw93LmTt8VbNc4HsD", "a", "1", "é", "\r\n", "X="),
    ]
)


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join))
def test_redacting_twice_is_redacting_once_and_keeps_the_lines(text: str) -> None:
    once = redact(text)
    assert redact(once) == once
    assert once.count("\n") == text.count("\n")


@settings(deadline=None)
@given(st.lists(PIECES, max_size=20).map("".join), st.integers(0, 200))
def test_a_cut_shows_no_more_than_the_whole(text: str, cut: int) -> None:
    whole = redact(text)
    for part in (redact(text, 0, cut), redact(text, cut)):
        assert MARK.sub("", part) == "" or all(piece in whole for piece in MARK.split(part)[::2])


@settings(deadline=None)
@given(st.text(max_size=50), st.integers(0, 60))
def test_prefix_and_suffix_fit_and_end_on_characters(text: str, limit: int) -> None:
    clean = text.encode("utf-8", "ignore").decode()
    for part, belongs in ((utf8_prefix(clean, limit), clean.startswith), (utf8_suffix(clean, limit), clean.endswith)):
        assert len(part.encode()) <= limit
        assert belongs(part)
        assert len(clean.encode()) > limit or part == clean


@settings(deadline=None)
@given(st.lists(st.sampled_from(["", " ", "1", "2", "x", 1, 3]), max_size=12))
def test_todo_ids_are_distinct_and_given_ones_are_kept(ids: list[str | int]) -> None:
    todos = with_ids([TodoItem(id=own, content=str(n)) for n, own in enumerate(ids)])
    assert len({todo.id for todo in todos}) == len(ids)
    assert all(todo.id.strip() for todo in todos)
    assert [todo.content for todo in todos] == [str(n) for n in range(len(ids))]
    firsts = {str(own).strip(): n for n, own in reversed(list(enumerate(ids))) if str(own).strip()}
    assert all(todos[n].id == own for own, n in firsts.items())
