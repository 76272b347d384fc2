"""Single-token edits of a function body: the bug of a task, and the fixes an imperfect agent might try.

A mutation replaces one token by a plausible other (an operator by its neighbour, an argument by another of its kind,
an index, an aggregate) or adds or drops a `not` before `in`. No mutation adds a loop, so a body that is bounded stays
so.
"""

import re
from collections.abc import Sequence

import msgspec

TOKEN = re.compile(r"[A-Za-z_][A-Za-z_0-9]*|-1|\d+|\+=|-=|>=|<=|==|!=|//|\n|\s+|.")

SWAPS: dict[str, tuple[str, ...]] = {
    "+": ("-", "*"),
    "-": ("+",),
    "*": ("+",),
    "%": ("//",),
    "//": ("%",),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    "==": ("!=",),
    "!=": ("==",),
    "max": ("min",),
    "min": ("max",),
    "and": ("or",),
    "or": ("and",),
    "any": ("all",),
    "all": ("any",),
    "sum": ("len",),
    "len": ("sum",),
    "True": ("False",),
    "False": ("True",),
    "upper": ("lower",),
    "lower": ("upper",),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "0": ("1", "-1"),
    "1": ("0", "2"),
    "2": ("1",),
    "-1": ("0",),
    "+=": ("-=",),
    "-=": ("+=",),
}


class Mutation(msgspec.Struct, frozen=True):
    """Line `line` (from 0, of the body) becomes `text`, indentation included."""

    line: int
    text: str


def mutations(lines: Sequence[str], args: Sequence[tuple[str, str]]) -> list[Mutation]:
    """Every plausible single edit of a body, in a fixed order."""
    kinds = dict(args)
    found = []
    for number, line in enumerate(lines):
        tokens = TOKEN.findall(line)
        for at, token in enumerate(tokens):
            for text in _replacements(tokens, at, token, kinds):
                if text != line:
                    found.append(Mutation(number, text))
    return found


def _replacements(tokens: list[str], at: int, token: str, kinds: dict[str, str]) -> list[str]:
    before, after = "".join(tokens[:at]), "".join(tokens[at + 1 :])
    if token == "in" and "for" not in tokens:
        negated = tokens[max(0, at - 2)] == "not"
        return ["".join(tokens[: at - 2]) + "in" + after] if negated else [before + "not in" + after]
    if token == "-1" and before[-1:] not in ("[", " ", "("):
        return []  # `a -1` is a subtraction
    others = list(SWAPS.get(token, ()))
    if token in kinds:
        others += [name for name, kind in kinds.items() if name != token and kind == kinds[token]]
    return [before + other + after for other in others]
