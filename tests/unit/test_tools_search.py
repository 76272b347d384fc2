"""read_file, list_dir, glob, grep, semantic_search: bounded, numbered alike, and never stuck."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from support.local_workspace import LocalWorkspace

from odradek.actors.tools.helper import Helper, HelperLost, HelperRefused
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.registry import run_call
from odradek.actors.tools.semantic_search import FIRST_LINE

SMALL = Limits(output_bytes=200, read_lines=5, line_chars=40, hits=4, pattern_seconds=0.5)


async def text(root: Path, name: str, limits: Limits | None = None, /, **arguments: str) -> str:
    outcome = await run_call(LocalWorkspace(root), name, arguments, limits or Limits())
    assert outcome.is_error == outcome.text.startswith("error: ")
    return outcome.text


# -- read_file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "a", "a\n", "\n", "a\r\nb", "\ufeffa\tb\n\n", "a\x0cb\u2028c\n", "ø→漢\n"])
async def test_a_file_is_shown_exactly_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "f").write_bytes(content.encode())
    assert await text(tmp_path, "read_file", path="f") == content


async def test_pages_join_to_the_whole_file(tmp_path: Path) -> None:
    lines = [f"line {n}\n" for n in range(1, 18)]
    (tmp_path / "f").write_text("".join(lines))
    seen, offset = "", 1
    while offset:
        page = await text(tmp_path, "read_file", SMALL, path="f", offset=str(offset))
        body, _, marker = page.rpartition("[truncated: lines ")
        last = offset + 4
        if marker and body:
            assert marker == f"{offset}-{last} of 17; read on with offset={last + 1}]"
            seen, offset = seen + body, last + 1
        else:
            seen, offset = seen + page, 0
    assert seen == "".join(lines)


async def test_the_limit_given_is_obeyed_and_the_marker_tells_the_rest(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\nb\nc\n")
    assert await text(tmp_path, "read_file", path="f", offset="2", limit="1") == (
        "b\n[truncated: lines 2-2 of 3; read on with offset=3]"
    )
    assert await text(tmp_path, "read_file", path="f", offset="4") == "error: offset 4 is past the end; f has 3 lines"


async def test_one_line_longer_than_the_cap_is_cut_on_a_character_and_flagged(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("漢" * 1000 + "\nnext\n")
    assert await text(tmp_path, "read_file", SMALL, path="f") == (
        "漢" * 66 + "\n[truncated: lines 1-1 of 2, line 1 cut at 66 of 1001 characters; read on with offset=2]"
    )


async def test_a_binary_file_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\x7fELF\0\0")
    assert await text(tmp_path, "read_file", path="f") == (
        "error: f is a binary file of 6 bytes; look at it with run_terminal"
    )


async def test_a_file_too_large_to_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 2000)
    limits = msgspec.structs.replace(SMALL, file_bytes=1000)
    assert "more than 1000 bytes" in await text(tmp_path, "read_file", limits, path="f")


async def test_no_page_of_a_private_key_is_shown(tmp_path: Path) -> None:
    body = [f"MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn{n:02}" for n in range(30)]
    kind = "PRIVATE" + " KEY-----"
    (tmp_path / "id").write_text("\n".join([f"-----BEGIN {kind}", *body, f"-----END {kind}", ""]))
    for offset in range(1, 33, 5):
        assert "MIIEp" not in await text(tmp_path, "read_file", SMALL, path="id", offset=str(offset))
    assert await text(tmp_path, "grep", pattern="MIIEp", path="id") == "no match"


# -- list_dir, glob ----------------------------------------------------------------------------------------------------


async def test_a_directory_is_listed_sorted_with_slashes(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", ".env", "new\nline"):
        (tmp_path / name).write_text("")
    (tmp_path / "a").mkdir()
    assert await text(tmp_path, "list_dir") == ".env\na/\na.py\nb.py\nnew\\nline"
    assert await text(tmp_path, "list_dir", path="a") == "[empty directory]"
    assert await text(tmp_path, "list_dir", path="b") == "error: no such directory b"


async def test_a_long_listing_is_capped_with_a_way_on(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"f{number}").write_text("")
    assert await text(tmp_path, "list_dir", SMALL) == (
        "f0\nf1\nf2\nf3\n[truncated: 4 of 9; use glob with a pattern for the rest]"
    )


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("*.py", ".", "a.py\nsrc/b.py\nsrc/deep/test_c.py"),
        ("src/*.py", ".", "src/b.py"),
        ("**/test_*.py", ".", "src/deep/test_c.py"),
        ("src", ".", "src/b.py\nsrc/deep/test_c.py"),
        ("*.py", "src", "src/b.py\nsrc/deep/test_c.py"),
        ("*.py", "src/b.py", "src/b.py"),
        ("[ab].py", ".", "a.py\nsrc/b.py"),
        ("*.rs", ".", "no match"),
    ],
)
async def test_glob(tmp_path: Path, pattern: str, path: str, found: str) -> None:
    for name in ("a.py", "src/b.py", "src/deep/test_c.py", "notes.md", ".git/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert await text(tmp_path, "glob", pattern=pattern, path=path) == found


@pytest.mark.parametrize("pattern", ["", "  ", "!a", "#a"])
async def test_a_glob_that_can_match_nothing_is_an_error(tmp_path: Path, pattern: str) -> None:
    assert (await text(tmp_path, "glob", pattern=pattern)).startswith("error: glob: pattern")


async def test_a_glob_with_many_stars_ends(tmp_path: Path) -> None:
    (tmp_path / ("a" * 200)).write_text("")
    answer = await text(tmp_path, "glob", SMALL, pattern="*a" * 40 + "b")
    assert answer == "no match" or "can't be matched in time" in answer


# -- grep --------------------------------------------------------------------------------------------------------------


async def test_case_llmkube_1487_a_hit_in_a_one_line_bundle_is_an_excerpt_and_the_other_hit_is_there(
    tmp_path: Path,
) -> None:
    """LLMKube #1487: one hit in a one-line bundle returns 650 kB, and truncated=false."""
    (tmp_path / "bundle.js").write_text("ü" * 500_000 + "needle" + "漢" * 500_000)
    (tmp_path / "code.py").write_text("x = 1\nneedle = 2\n")
    for pattern in ("needle", "need+le"):
        first, second = (await text(tmp_path, "grep", pattern=pattern)).split("\n")
        assert first.startswith("bundle.js:1:…ü")
        assert "üneedle漢" in first
        assert first.endswith("漢… [line cut: characters 499868-500267 of 1000006]")
        assert len(first) < 500
        assert second == "code.py:2:needle = 2"


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("total", "a.py:1:def total(a):\na.py:3:total(1)"),
        ("^total", "a.py:3:total(1)"),
        (r"def \w+\(a\):$", "a.py:1:def total(a):"),
        ("total(1", "a.py:3:total(1)"),
        ("return a [", "no match"),
        ("absent", "no match"),
    ],
)
async def test_a_pattern_is_an_expression_or_else_plain_text(tmp_path: Path, pattern: str, hits: str) -> None:
    (tmp_path / "a.py").write_bytes(b"def total(a):\r\n    return a\r\ntotal(1)")
    (tmp_path / "data.bin").write_bytes(b"\0total\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("total")
    assert await text(tmp_path, "grep", pattern=pattern) == hits


async def test_hits_are_capped_with_their_true_number(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("hit\n" * 50)
    for pattern in ("hit", "h.t"):
        assert await text(tmp_path, "grep", SMALL, pattern=pattern) == (
            "f:1:hit\nf:2:hit\nf:3:hit\nf:4:hit\n[truncated: 4 of 50 lines; narrow the pattern or pass path]"
        )


async def test_what_was_not_searched_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("hit\n")
    (tmp_path / "b").write_text("hit " * 300)
    limits = msgspec.structs.replace(SMALL, file_bytes=1000)
    assert await text(tmp_path, "grep", limits, pattern="hit") == ("a:1:hit\n[not searched, too large: b (1200 bytes)]")
    limits = msgspec.structs.replace(SMALL, scan_bytes=1000)
    assert "[searched only 2 files, 4 bytes; pass a narrower path]" in await text(
        tmp_path, "grep", limits, pattern="hit"
    )
    limits = msgspec.structs.replace(SMALL, scan_files=1)
    assert "[searched only 0 files" in await text(tmp_path, "grep", limits, pattern="hit")


async def test_a_backtracking_pattern_is_stopped_and_the_next_search_works(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a" * 60 + "!\nplain\n")
    slow, quick = await asyncio.gather(
        text(tmp_path, "grep", SMALL, pattern="(a+)+$"), text(tmp_path, "grep", SMALL, pattern="pl.in")
    )
    assert slow == (
        "error: the pattern needs more than 0.5 s of CPU; simplify it, search for plain text, or pass a narrower path"
    )
    assert quick == "f:2:plain"


async def test_grep_can_not_be_used_to_guess_a_secret(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=1\nDB_PASSWORD=hunter2\n")
    assert await text(tmp_path, "grep", pattern="hunter") == "no match"
    assert await text(tmp_path, "grep", pattern="DB_PASS.*hun") == "no match"
    assert await text(tmp_path, "grep", pattern="DB_PASS") == ".env:2:DB_PASSWORD=[redacted:PASSWORD]"


async def test_an_empty_pattern_or_one_of_two_lines_is_refused(tmp_path: Path) -> None:
    for pattern in ("", "a\nb"):
        assert (await text(tmp_path, "grep", pattern=pattern)).startswith("error: grep: the pattern is one line")
    assert await text(tmp_path, "grep", pattern="a", path="gone") == "error: no such file or directory gone"


# -- semantic_search ---------------------------------------------------------------------------------------------------


async def test_semantic_search_ranks_by_words_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "http.py").write_text("import re\n\ndef parseHeaders(raw):\n    return raw.split()\n")
    (tmp_path / "other.py").write_text("def unrelated():\n    return 1\n")
    answer = await text(tmp_path, "semantic_search", query="header parsing")
    assert answer == f"{FIRST_LINE}\nhttp.py:3:def parseHeaders(raw):"
    assert await text(tmp_path, "semantic_search", query="zebra") == f"{FIRST_LINE}\nno match"
    assert (await text(tmp_path, "semantic_search", query=" ?! ")).startswith("error: ")


# -- the helper process ------------------------------------------------------------------------------------------------


def test_the_helper_survives_refusals_and_is_replaced_after_a_loss() -> None:
    helper = Helper()
    try:
        with pytest.raises(HelperRefused):
            helper.call("search", ("(", ["a"], 1), 1.0)
        with pytest.raises(HelperLost):
            helper.call("search", ("(a|aa)+$", ["a" * 100 + "!"], 1), 0.2)
        (answer,), used = helper.call("search", ("b", ["a\nb\nb"], 1), 1.0)
        assert answer == ([(2, 0, 1)], 2)
        assert used >= 0
    finally:
        helper.close()
