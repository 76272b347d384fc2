"""Which line of a file a misquoted text most likely meant. Pure, and a function of its input alone: no clock, so that
the same call always gets the same answer.
"""

import difflib

CANDIDATE_LINES = 2_000
"""Lines compared in full; in a longer file those that share a word with the wanted line come first. Too low: the hint
misses; too high: a failed edit of a huge file takes seconds."""

COMPARED_CHARS = 400
"""Beginning of a line that is compared: comparing takes time square to it."""


def nearest_line(text: str, old: str) -> tuple[int, str]:
    """Number (from 1) and text of the line most like `old`; the first one of equals.

    For an `old` of several lines the place is found by its first line, and the answer is the first line from there on
    that differs: the one the model misquoted.
    """
    lines = text.splitlines() or [""]
    wanted = old.strip("\r\n").splitlines() or [""]
    while len(wanted) > 1 and not wanted[0].strip():
        wanted.pop(0)
    at = _best(lines, wanted[0])
    for offset, line in enumerate(wanted):
        if at + offset < len(lines) and lines[at + offset] != line:
            at += offset
            break
    return at + 1, lines[at]


def _best(lines: list[str], wanted: str) -> int:
    wanted = wanted.strip()[:COMPARED_CHARS]
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    best, best_ratio = 0, -1.0
    for at in _candidates(lines, wanted):
        matcher.set_seq1(lines[at].strip()[:COMPARED_CHARS])
        if matcher.real_quick_ratio() > best_ratio and matcher.quick_ratio() > best_ratio:
            ratio = matcher.ratio()
            if ratio > best_ratio:
                best, best_ratio = at, ratio
    return best


def _candidates(lines: list[str], wanted: str) -> list[int]:
    if len(lines) <= CANDIDATE_LINES:
        return list(range(len(lines)))
    words = set(wanted.split())
    sharing = [at for at, line in enumerate(lines) if words.intersection(line.split())]
    return (sharing or list(range(len(lines))))[:CANDIDATE_LINES]
