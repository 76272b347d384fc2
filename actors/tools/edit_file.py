"""edit_file: replace one quoted piece of a file by another, both literal.

The quote must stand in the file exactly once. Nothing in `new` is expanded. The file's own line ends and byte-order
mark are kept and need not be quoted; `new` gets the line ends of the place it is put. Only bytes that differ are
written anew, so other bytes survive even where they are no valid text. In a file that is not UTF-8, `new` is written in
Latin-1, as the file was shown; characters it lacks refuse the edit.
"""

import re
from typing import Annotated

import msgspec

from odradek.actors.tools import diff
from odradek.actors.tools.errors import NoMatch
from odradek.actors.tools.nearest import nearest_line
from odradek.actors.tools.redact import MARK
from odradek.actors.tools.spec import Answer, Context, Display, ToolSpec
from odradek.actors.tools.text import cut_line, decode

BYTE_ORDER_MARK = "\ufeff"


class EditFile(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of edit_file."""

    path: Annotated[str, msgspec.Meta(description="File to edit, relative to the workspace")]
    old: Annotated[str, msgspec.Meta(description="Text to replace, exactly as read_file shows it, found only once")]
    new: Annotated[str, msgspec.Meta(description="Text to put in its place, taken literally")]


async def run(context: Context, arguments: EditFile) -> Answer:
    """`ok`, and the diff for a person."""
    before = await context.workspace.read(arguments.path, context.limits.file_bytes)
    after = replace_once(before, arguments.old, arguments.new, arguments.path, context.limits.line_chars)
    await context.workspace.write(arguments.path, after)
    return Answer("ok", Display("diff", arguments.path, diff.unified(arguments.path, before, after)))


def replace_once(content: bytes, old: str, new: str, path: str, line_chars: int) -> bytes:
    """The file's new bytes, or `NoMatch` with what would help. Pure."""
    text = decode(content)
    bom = text.startswith(BYTE_ORDER_MARK)
    shown = text.removeprefix(BYTE_ORDER_MARK).replace("\r\n", "\n")
    old = _normal(old, bom)
    new = _normal(new, bom)
    if old == new:
        raise NoMatch("old and new are the same")
    if not old:
        raise NoMatch("old is empty; quote the text to replace, or use write_file")
    at = _find_only(shown, old, line_chars, path)
    same = _common(old, new)
    tail = _common(old[same:][::-1], new[same:][::-1])
    start, stop = at + same, at + len(old) - tail
    return _splice(content, text, shown, (start, stop), new[same : len(new) - tail], path)


def _normal(quoted: str, bom: bool) -> str:
    quoted = quoted.replace("\r\n", "\n")
    return quoted.removeprefix(BYTE_ORDER_MARK) if bom else quoted


def _find_only(shown: str, old: str, line_chars: int, path: str) -> int:
    at = shown.find(old)
    if at < 0:
        if MARK.search(old):
            raise NoMatch("old text found 0 times; [redacted:…] stands for hidden text: quote only what is around it")
        if not shown:
            raise NoMatch(f"old text found 0 times; {path} is empty")
        number, line = nearest_line(shown, old)
        raise NoMatch(f"old text found 0 times; nearest line {number}: {cut_line(line, line_chars)}")
    if shown.find(old, at + 1) >= 0:
        raise NoMatch(f"old text found {max(2, shown.count(old))} times; quote more of it")
    return at


def _common(a: str, b: str) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    return next((at for at in range(length) if a[at] != b[at]), length)


def _splice(content: bytes, text: str, shown: str, place: tuple[int, int], new: str, path: str) -> bytes:
    """Put `new` for `shown[start:stop]`, found back in the bytes that `shown` was made from."""
    start, stop = (_byte_offset(content, text, shown, at) for at in place)
    lines = text.split("\n")
    line = shown.count("\n", 0, place[0])
    ending = next((end.endswith("\r") for end in (lines[line:-1] or lines[line - 1 : -1])), False)
    if ending:
        new = new.replace("\n", "\r\n")
    return content[:start] + _encode(new, content, path) + content[stop:]


def _byte_offset(content: bytes, text: str, shown: str, at: int) -> int:
    newlines = shown.count("\n", 0, at)
    carriage_returns = sum(line.endswith("\r") for line in text.split("\n")[:newlines])
    at += carriage_returns + text.startswith(BYTE_ORDER_MARK)
    exact = content.decode("utf-8", "surrogateescape")  # as long as `text`, but knows which characters are stray bytes
    return len(exact[:at].encode("utf-8", "surrogateescape"))


def _encode(new: str, content: bytes, path: str) -> bytes:
    try:
        return new.encode(_encoding(content))
    except UnicodeEncodeError as error:
        lacking = new[error.start]
        raise NoMatch(f"new has {lacking!r}, which {path} can't hold as {error.encoding}; nothing changed") from error


def _encoding(content: bytes) -> str:
    """Latin-1 only if the file has bytes above 127 and not one of them is part of a UTF-8 character."""
    text = content.decode("utf-8", "surrogateescape")
    beyond_ascii = set(re.findall(r"[^\x00-\x7f]", text))
    strays = {c for c in beyond_ascii if 0xDC80 <= ord(c) <= 0xDCFF}
    return "latin-1" if strays and strays == beyond_ascii else "utf-8"


TOOL = ToolSpec(
    name="edit_file",
    description="Replace a piece of a file, quoted exactly, by another.",
    arguments=EditFile,
    effect="workspace",
    leaves_delta=True,
    run=run,
)
