"""Text of files and names, the same way in every tool. Pure.

A line ends at "\\n" and nothing else (a form feed or U+2028 inside a line is a character), lines are numbered from 1,
and a final "\\n" does not start another line.
"""

import re

CUT_MARK = "…"
"""Stands at the side on which a line was cut."""


def split_lines(text: str) -> list[str]:
    """The lines with their ends; joined they are the text.

    >>> split_lines("a\\nb\\r\\nc")
    ['a\\n', 'b\\r\\n', 'c']
    """
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def decode(content: bytes) -> str:
    """The file's text. A byte that is no UTF-8 becomes the Latin-1 character of its value: one character, never a
    replacement mark, and `edit_file` finds the byte back from it."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        text = content.decode("utf-8", "surrogateescape")
        return _STRAY.sub(lambda match: chr(ord(match[0]) - 0xDC00), text)


_STRAY = re.compile("[\udc80-\udcff]")

BINARY_PROBE_BYTES = 8192
"""A NUL byte this early means binary, as git and grep decide it."""


def is_binary(content: bytes) -> bool:
    """Whether tools treat the file as data rather than text."""
    return b"\0" in content[:BINARY_PROBE_BYTES]


def show_name(name: str) -> str:
    """A file name on one line: control characters and bytes that are no UTF-8 are escaped."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def cut_line(line: str, limit: int) -> str:
    """The line without its end, at most about `limit` characters, with a mark and the true length if cut."""
    line = line.rstrip("\r\n")
    return line if len(line) <= limit else f"{line[:limit]}{CUT_MARK} [line cut: {len(line)} characters]"


def utf8_prefix(text: str, limit: int) -> str:
    """The longest prefix of at most `limit` UTF-8 bytes; never ends inside a character."""
    if len(text) * 4 <= limit:
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    return text if len(encoded) <= limit else encoded[:limit].decode("utf-8", "ignore")


def utf8_suffix(text: str, limit: int) -> str:
    """The longest suffix of at most `limit` UTF-8 bytes; never begins inside a character."""
    if len(text) * 4 <= limit:
        return text
    encoded = text.encode("utf-8", "surrogatepass")
    return text if len(encoded) <= limit else encoded[len(encoded) - limit :].decode("utf-8", "ignore")


def cap_lines(lines: list[str], limit_lines: int, limit_bytes: int, rest: str) -> str:
    """One entry a line, cut at the caps; `rest` says how to get what is left out."""
    shown: list[str] = []
    size = 0
    for line in lines:
        size += len(line.encode("utf-8", "surrogatepass")) + 1
        if len(shown) == limit_lines or (size > limit_bytes and shown):
            break
        shown.append(line)
    if len(shown) < len(lines):
        shown.append(f"[truncated: {len(shown)} of {len(lines)}; {rest}]")
    return "\n".join(shown)
