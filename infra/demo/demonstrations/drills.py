"""Copy drills: short exercises in the template's form that teach exact copying of names and lines never seen.

Copying is what a small policy learns last, and nothing works without it. Two kinds: requests on a few random names
(echo, repeat, item, read, search, edit), and one-token edits in random expressions, which no function template limits.
"""

import random
import re

from odradek.actors.policy.template import Call, XmlTemplate
from odradek.infra.demo.demonstrations.scripted import edit, read
from odradek.infra.demo.demonstrations.segments import Segment
from odradek.infra.demo.family.mutations import TOKEN
from odradek.infra.demo.family.names import Names, WordLists, shipped_words

DRILL_TOKENS = 240
"""Drills are joined up to about this many tokens, a demonstration's usual length, so that batches pad little."""

EXPRESSION_SHARE = 0.5
"""Share of random-expression edits; more helps lines of unseen templates at some cost elsewhere."""

MAX_TRIES = 50
"""Draws until an expression has a token to replace (expected: under 2)."""

BINARY = ("+", "-", "*", "//", "%", ">", "<", ">=", "<=", "==", "!=", "and", "or")
FUNCTIONS = ("max", "min", "sum", "len", "sorted", "abs", "any", "all")
_WORD = re.compile(r"[a-z_]+")
_REPLACEABLE = re.compile(r"[a-z_]+|[<>=!+*/%-]+|\d")
_KEPT = frozenset(("return", "for", "in", "if", "else", "="))


def drill(rng: random.Random, template: XmlTemplate, words: WordLists | None = None) -> list[Segment]:
    """Several drills joined into one training sequence."""
    words = words or shipped_words()
    segments: list[Segment] = []
    length = 0
    while length < DRILL_TOKENS:
        make = _expression_edit if rng.random() < EXPRESSION_SHARE else _request
        more = make(rng, template, words)
        segments += more
        length += sum(len(segment.token_ids) for segment in more)
    return segments


def _request(rng: random.Random, template: XmlTemplate, word_lists: WordLists) -> list[Segment]:
    names = Names(rng, word_lists)
    words = [names.fresh("local") for _ in range(rng.randint(2, 5))]
    paths = [f"{word}.py" for word in words]
    chosen = rng.randrange(len(words))
    turns: dict[str, tuple[str, list[int]]] = {
        "echo": (f"echo {' '.join(words)}", template.turn(text=" ".join(words))),
        "repeat": (f"repeat {words[0]}", template.turn(text=" ".join([words[0]] * rng.randint(2, 3)))),
        "item": (f"item {chosen + 1}\n{' '.join(words)}", template.turn(text=words[chosen])),
        "read": (f"read\n{' '.join(paths)}", template.turn([read(path) for path in paths[:3]])),
        "find": (f"find test_{words[0]}\n{paths[-1]}", template.turn([Call("grep", {"pattern": f"def {words[0]}"})])),
        "edit": _edit_request(rng, words, template),
    }
    task, turn = turns[rng.choice(tuple(turns))]
    return [Segment(template.open(task), False), Segment(turn, True)]


def _edit_request(rng: random.Random, words: list[str], template: XmlTemplate) -> tuple[str, list[int]]:
    old, new = random_line(rng, words), random_line(rng, words)
    path = f"{words[-1]}.py"
    return f"edit {path}\n{old}\n{new}", template.turn([edit(path, old, new)])


def random_expression(rng: random.Random, names: list[str], depth: int) -> str:
    """An expression over the names: syntax-like, not meant to run."""

    def inner() -> str:
        return random_expression(rng, names, depth - 1)

    kind = rng.random()
    if depth <= 0 or kind < 0.3:
        return rng.choice(names) if rng.random() < 0.8 else str(rng.randint(0, 3))
    if kind < 0.6:
        return f"{inner()} {rng.choice(BINARY)} {inner()}"
    if kind < 0.75:
        return f"{rng.choice(FUNCTIONS)}({', '.join(inner() for _ in range(rng.choice((1, 1, 2))))})"
    if kind < 0.84:
        return f"{rng.choice(names)}[{random_expression(rng, names, 0)}]"
    if kind < 0.9:
        return f"({inner()})"
    if kind < 0.95:
        name = rng.choice(names)
        return f"[{inner()} for {name} in {rng.choice(names)}]"
    return f"{inner()} if {inner()} else {random_expression(rng, names, 0)}"


def random_line(rng: random.Random, names: list[str]) -> str:
    """A statement around a random expression."""
    value = random_expression(rng, names, 2)
    kind = rng.random()
    if kind < 0.45:
        return f"return {value}"
    if kind < 0.65:
        return f"{rng.choice(names)} = {value}"
    if kind < 0.72:
        return f"{rng.choice(names)} {rng.choice(('+=', '-='))} {value}"
    return f"for {rng.choice(names)} in {value}:" if kind < 0.82 else f"if {value}:"


def _expression_edit(rng: random.Random, template: XmlTemplate, word_lists: WordLists) -> list[Segment]:
    """`swap A B` in a file: read it, then replace A by B in the first line that has it."""
    for _ in range(MAX_TRIES):
        names = Names(rng, word_lists)
        variables = [names.fresh("argument") for _ in range(rng.randint(2, 5))]
        path, function = f"{names.fresh('local')}.py", names.fresh("function")
        drawn = dict.fromkeys(random_line(rng, variables) for _ in range(rng.randint(1, 4)))
        lines = [line for line in drawn if len(line) < 70]
        swap = _swap(rng, lines, variables)
        if swap is None:
            continue
        old, new, before, after = swap
        source = f"def {function}({', '.join(variables)}):\n" + "".join(f"    {line}\n" for line in lines)
        return [
            Segment(template.open(f"swap {old} {new}\n{path}"), False),
            Segment(template.turn([read(path)]), True),
            Segment(template.results([source]), False),
            Segment(template.turn([edit(path, before, after)]), True),
        ]
    raise RuntimeError(f"no expression drill in {MAX_TRIES} draws")


def _swap(rng: random.Random, lines: list[str], variables: list[str]) -> tuple[str, str, str, str] | None:
    """(token, its replacement, the first line with the token, that line after)."""
    if not lines:
        return None
    tokens = [t for t in TOKEN.findall(rng.choice(lines)) if _REPLACEABLE.fullmatch(t) and t not in _KEPT]
    if not tokens:
        return None
    old = rng.choice(tokens)
    new = _replacement(rng, old, variables)
    if new == old:
        return None
    before = next(line for line in lines if old in TOKEN.findall(line))
    found = TOKEN.findall(before)
    at = found.index(old)
    return old, new, before, "".join((*found[:at], new, *found[at + 1 :]))


def _replacement(rng: random.Random, token: str, variables: list[str]) -> str:
    if token in FUNCTIONS:
        return rng.choice(FUNCTIONS)
    if token in ("and", "or"):
        return "or" if token == "and" else "and"
    if _WORD.fullmatch(token):
        return rng.choice(variables)
    return str(rng.randint(0, 3)) if token.isdigit() else rng.choice(BINARY[:11])
