"""The unified diff of one file, for a person. Pure.

It shows the bytes on disk: applied to the old content it gives the new one, line ends and a missing last newline
included. The changed region is found from both ends, and only that is compared line by line, because a full comparison
of two large files takes quadratic time.
"""

import difflib

from odradek.actors.tools.text import decode, split_lines

CONTEXT_LINES = 3
"""Unchanged lines around a change, the usual number."""

COMPARED_LINES = 800
"""Largest changed region compared line by line; a larger one is shown as removed and added. Too high:
seconds of CPU."""


def unified(path: str, before: bytes | None, after: bytes) -> str:
    """The diff from `before` (None: the file is new) to `after`."""
    old, new = split_lines(decode(before or b"")), split_lines(decode(after))
    if old == new:
        return ""
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    start, stop = max(0, head - CONTEXT_LINES), max(0, tail - CONTEXT_LINES)
    old_region, new_region = old[start : len(old) - stop], new[start : len(new) - stop]
    if len(old_region) + len(new_region) > COMPARED_LINES:
        hunks = [_whole_hunk(start, old_region, new_region)]
    else:
        hunks = _hunks(start, old_region, new_region)
    header = [f"--- {'/dev/null' if before is None else 'a/' + path}\n", f"+++ b/{path}\n"]
    return "".join(header + hunks)


def _hunks(start: int, old: list[str], new: list[str]) -> list[str]:
    out = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        lines = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += _marked(" ", old[i1:i2])
            else:
                lines += _marked("-", old[i1:i2]) + _marked("+", new[j1:j2])
        first, last = group[0], group[-1]
        out.append(_hunk_header(start, (first[1], last[2]), (first[3], last[4])) + "".join(lines))
    return out


def _whole_hunk(start: int, old: list[str], new: list[str]) -> str:
    header = _hunk_header(start, (0, len(old)), (0, len(new)))
    return header + "".join(_marked("-", old) + _marked("+", new))


def _hunk_header(start: int, old: tuple[int, int], new: tuple[int, int]) -> str:
    def part(first: int, stop: int) -> str:
        length = stop - first
        return f"{start + first + (1 if length else 0)},{length}"

    return f"@@ -{part(*old)} +{part(*new)} @@\n"


def _marked(sign: str, lines: list[str]) -> list[str]:
    return [sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n" for line in lines]
