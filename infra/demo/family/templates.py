"""Function templates: what the functions of a task do, as (docstring, arguments, body).

A template draws its operations and names and returns a `Draft`; the draft's `key` names the drawn operations, so that
a share of a template's operation combinations can be held out. `TRAINING` templates appear in every set but
`unseen_templates`, `HELD_OUT` ones only there. Bodies stay inside the bounded subset that `evaluate` accepts: the only
loops run over an argument or a `range` of two arguments.
"""

import random
from collections.abc import Callable
from typing import Literal

import msgspec

from odradek.infra.demo.family.names import Names

ArgumentKind = Literal["int", "list", "text", "affix"]
"""What test inputs an argument gets: a small int, a list of them, a short text, or a letter that may start/end it."""


class Draft(msgspec.Struct, frozen=True):
    """One drawn function before it has a name."""

    key: str
    doc: str
    args: tuple[tuple[str, ArgumentKind], ...]
    lines: tuple[str, ...]


Template = Callable[[random.Random, Names], Draft]

COMPARISONS = (
    ("above", ">"),
    ("below", "<"),
    ("at least", ">="),
    ("at most", "<="),
    ("equal to", "=="),
    ("not equal to", "!="),
)
OPERATIONS = (("plus", "+"), ("minus", "-"), ("times", "*"), ("modulo", "%"), ("divided by", "//"))
AGGREGATES = {"sum": "sum", "number": "len", "largest": "max", "smallest": "min"}
POSITIONS = (("first", "0"), ("second", "1"), ("third", "2"), ("last", "-1"))


def _draft(key: str, doc: str, args: list[tuple[str, ArgumentKind]], *lines: str) -> Draft:
    return Draft(key, doc, tuple(args), lines)


def arithmetic(rng: random.Random, names: Names) -> Draft:
    a, b = names.fresh("argument"), names.fresh("argument")
    word, op = rng.choice(OPERATIONS)
    doc = rng.choice((f"Return {a} {word} {b}.", f"Give {a} {word} {b}."))
    return _draft(word, doc, [(a, "int"), (b, "int")], f"return {a} {op} {b}")


def two_operations(rng: random.Random, names: Names) -> Draft:
    a, b, c = (names.fresh("argument") for _ in range(3))
    (word, op), (word2, op2) = rng.choice(OPERATIONS), rng.choice(OPERATIONS)
    doc = f"Return {a} {word} {b}, then {word2} {c}."
    return _draft(word + word2, doc, [(a, "int"), (b, "int"), (c, "int")], f"return ({a} {op} {b}) {op2} {c}")


def two_steps(rng: random.Random, names: Names) -> Draft:
    a, b, c = (names.fresh("argument") for _ in range(3))
    t = names.fresh("local")
    (word, op), (word2, op2) = rng.choice(OPERATIONS), rng.choice(OPERATIONS)
    doc = f"Take {a} {word} {b} and return it {word2} {c}."
    args: list[tuple[str, ArgumentKind]] = [(a, "int"), (b, "int"), (c, "int")]
    return _draft(word + word2, doc, args, f"{t} = {a} {op} {b}", f"return {t} {op2} {c}")


def filtered(rng: random.Random, names: Names) -> Draft:
    xs, k, v = names.fresh("list"), names.fresh("argument"), names.fresh("argument")
    group = rng.choice(("sum", "number"))
    word, op = rng.choice(COMPARISONS)
    doc = rng.choice((f"Return the {group} of {xs} {word} {k}.", f"Find the {group} of {xs} that are {word} {k}."))
    line = f"return {AGGREGATES[group]}([{v} for {v} in {xs} if {v} {op} {k}])"
    return _draft(group + word, doc, [(xs, "list"), (k, "int")], line)


def loop_aggregate(rng: random.Random, names: Names) -> Draft:
    xs, k, v, t = names.fresh("list"), names.fresh("argument"), names.fresh("argument"), names.fresh("local")
    group = rng.choice(("sum", "number"))
    word, op = rng.choice(COMPARISONS)
    doc = rng.choice((f"Loop for the {group} of {xs} {word} {k}.", f"Return the {group} of all {xs} {word} {k}."))
    return _draft(
        group + word,
        doc,
        [(xs, "list"), (k, "int")],
        f"{t} = 0",
        f"for {v} in {xs}:",
        f"    if {v} {op} {k}:",
        f"        {t} += {v if group == 'sum' else 1}",
        f"return {t}",
    )


def larger_of_two(rng: random.Random, names: Names) -> Draft:
    a, b = names.fresh("argument"), names.fresh("argument")
    word, function = rng.choice((("larger", "max"), ("smaller", "min")))
    if rng.random() < 0.35:
        doc = f"Return the {word} of {a} and {b}."
        return _draft(word, doc, [(a, "int"), (b, "int")], f"return {function}({a}, {b})")
    c = names.fresh("argument")
    word2, op = rng.choice(OPERATIONS)
    doc = f"Return the {word} of {a} and {b}, {word2} {c}."
    args: list[tuple[str, ArgumentKind]] = [(a, "int"), (b, "int"), (c, "int")]
    return _draft(word + word2, doc, args, f"return {function}({a}, {b}) {op} {c}")


def conditional(rng: random.Random, names: Names) -> Draft:
    x, k, a, b = (names.fresh("argument") for _ in range(4))
    word, op = rng.choice(COMPARISONS)
    doc = rng.choice(
        (f"Return {a} if {x} is {word} {k}, else {b}.", f"Pick {a} when {x} is {word} {k}, otherwise {b}.")
    )
    args: list[tuple[str, ArgumentKind]] = [(x, "int"), (k, "int"), (a, "int"), (b, "int")]
    return _draft(word, doc, args, f"if {x} {op} {k}:", f"    return {a}", f"return {b}")


def item(rng: random.Random, names: Names) -> Draft:
    xs = names.fresh("list")
    word, index = rng.choice(POSITIONS)
    if rng.random() < 0.4:
        return _draft(word, f"Return the {word} item of {xs}.", [(xs, "list")], f"return {xs}[{index}]")
    k = names.fresh("argument")
    word2, op = rng.choice(OPERATIONS)
    doc = f"Return the {word} item of {xs}, {word2} {k}."
    return _draft(word + word2, doc, [(xs, "list"), (k, "int")], f"return {xs}[{index}] {op} {k}")


def two_items(rng: random.Random, names: Names) -> Draft:
    xs = names.fresh("list")
    (word, i), (word2, j) = rng.sample(POSITIONS, 2)
    word3, op = rng.choice(OPERATIONS)
    doc = f"Return the {word} item of {xs} {word3} the {word2} item."
    return _draft(word + word3 + word2, doc, [(xs, "list")], f"return {xs}[{i}] {op} {xs}[{j}]")


def slice_aggregate(rng: random.Random, names: Names) -> Draft:
    xs = names.fresh("list")
    k = rng.choice((1, 2))
    word, part = rng.choice((("the first", f"[:{k}]"), ("all but the first", f"[{k}:]")))
    group, function = rng.choice((("sum", "sum"), ("largest", "max"), ("smallest", "min")))
    doc = f"Return the {group} of {word} {k} {xs}."
    return _draft(word + group + str(k), doc, [(xs, "list")], f"return {function}({xs}{part})")


def two_comparisons(rng: random.Random, names: Names) -> Draft:
    a, b, c, d = (names.fresh("argument") for _ in range(4))
    (word, op), (word2, op2) = rng.choice(COMPARISONS), rng.choice(COMPARISONS)
    join = rng.choice(("and", "or"))
    doc = f"Tell if {a} is {word} {b} {join} {c} is {word2} {d}."
    args: list[tuple[str, ArgumentKind]] = [(a, "int"), (b, "int"), (c, "int"), (d, "int")]
    return _draft(word + join + word2, doc, args, f"return {a} {op} {b} {join} {c} {op2} {d}")


def any_or_all(rng: random.Random, names: Names) -> Draft:
    xs, k, v = names.fresh("list"), names.fresh("argument"), names.fresh("argument")
    group = rng.choice(("any", "all"))
    word, op = rng.choice(COMPARISONS)
    doc = rng.choice((f"Tell if {group} {xs} are {word} {k}.", f"Check that {group} of {xs} are {word} {k}."))
    return _draft(group + word, doc, [(xs, "list"), (k, "int")], f"return {group}({v} {op} {k} for {v} in {xs})")


def sorted_item(rng: random.Random, names: Names) -> Draft:
    xs = names.fresh("list")
    word, reverse = rng.choice((("smallest", False), ("largest", True)))
    word2, index = rng.choice((("first", "0"), ("last", "-1"), ("second", "1")))
    doc = f"Sort {xs} {word} first and return the {word2} item."
    return _draft(word + word2, doc, [(xs, "list")], f"return sorted({xs}, reverse={reverse})[{index}]")


def text(rng: random.Random, names: Names) -> Draft:
    s, t = names.fresh("argument"), names.fresh("argument")
    if rng.random() < 0.5:
        word, method = rng.choice((("starts", "startswith"), ("ends", "endswith")))
        return _draft(word, f"Tell if {s} {word} with {t}.", [(s, "text"), (t, "affix")], f"return {s}.{method}({t})")
    word = rng.choice(("upper", "lower"))
    doc = f"Return {s} followed by {t} in {word} case."
    return _draft(word, doc, [(s, "text"), (t, "text")], f"return ({s} + {t}).{word}()")


def integers(rng: random.Random, names: Names) -> Draft:
    a, b = names.fresh("argument"), names.fresh("argument")
    included = rng.choice((0, 1))
    group, function = rng.choice((("sum", "sum"), ("number", "len")))
    doc = f"Return the {group} of integers from {a} up to {b}, {'with' if included else 'without'} {b}."
    line = f"return {function}(range({a}, {b} + {included}))"
    return _draft(group + str(included), doc, [(a, "int"), (b, "int")], line)


def membership(rng: random.Random, names: Names) -> Draft:
    xs, k = names.fresh("list"), names.fresh("argument")
    word, op = rng.choice((("present", "in"), ("missing", "not in")))
    if rng.random() < 0.5:
        return _draft(word, f"Tell if {k} is {word} in {xs}.", [(xs, "list"), (k, "int")], f"return {k} {op} {xs}")
    a = names.fresh("argument")
    word2, op2 = rng.choice(COMPARISONS)
    doc = f"Tell if {k} is {word} in {xs} and {word2} {a}."
    args: list[tuple[str, ArgumentKind]] = [(xs, "list"), (k, "int"), (a, "int")]
    return _draft(word + word2, doc, args, f"return {k} {op} {xs} and {k} {op2} {a}")


def each(rng: random.Random, names: Names) -> Draft:
    xs, k, v = names.fresh("list"), names.fresh("argument"), names.fresh("argument")
    word, op = rng.choice(OPERATIONS)
    args: list[tuple[str, ArgumentKind]] = [(xs, "list"), (k, "int")]
    body = f"[{v} {op} {k} for {v} in {xs}]"
    if rng.random() < 0.4:
        return _draft(word, f"Return each of {xs} {word} {k}.", args, f"return {body}")
    group = rng.choice(("sum", "sum", "largest", "smallest"))
    doc = f"Return the {group} of each of {xs} {word} {k}."
    return _draft(word + group, doc, args, f"return {AGGREGATES[group]}({body})")


def aggregate_operation(rng: random.Random, names: Names) -> Draft:
    xs, k = names.fresh("list"), names.fresh("argument")
    group = rng.choice(tuple(AGGREGATES))
    word, op = rng.choice(OPERATIONS)
    doc = f"Return the {group} of {xs}, {word} {k}."
    return _draft(group + word, doc, [(xs, "list"), (k, "int")], f"return {AGGREGATES[group]}({xs}) {op} {k}")


TRAINING: tuple[Template, ...] = (
    arithmetic,
    two_operations,
    two_steps,
    filtered,
    loop_aggregate,
    larger_of_two,
    conditional,
    item,
    two_items,
    slice_aggregate,
    two_comparisons,
    any_or_all,
    sorted_item,
    text,
    integers,
    membership,
    each,
    aggregate_operation,
)
