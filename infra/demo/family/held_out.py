"""Templates never trained on: the set `unseen_templates` and nothing else draws from them."""

import random

from odradek.infra.demo.family.names import Names
from odradek.infra.demo.family.templates import AGGREGATES, COMPARISONS, OPERATIONS, Draft, Template


def clamp(rng: random.Random, names: Names) -> Draft:
    x, low, high = (names.fresh("argument") for _ in range(3))
    doc = f"Return {x} kept at least {low} and at most {high}."
    line = f"return max({low}, min({x}, {high}))"
    return Draft("", doc, ((x, "int"), (low, "int"), (high, "int")), (line,))


def find_first(rng: random.Random, names: Names) -> Draft:
    xs, k, d, v = names.fresh("list"), *(names.fresh("argument") for _ in range(3))
    word, op = rng.choice(COMPARISONS)
    doc = f"Return the first of {xs} {word} {k}, else {d}."
    lines = (f"for {v} in {xs}:", f"    if {v} {op} {k}:", f"        return {v}", f"return {d}")
    return Draft(word, doc, ((xs, "list"), (k, "int"), (d, "int")), lines)


def zip_aggregate(rng: random.Random, names: Names) -> Draft:
    xs, ys, v, u = names.fresh("list"), names.fresh("list"), names.fresh("argument"), names.fresh("argument")
    word, op = rng.choice(OPERATIONS)
    group = rng.choice(("sum", "largest", "smallest"))
    doc = f"Return the {group} of {xs} {word} {ys} item by item."
    line = f"return {AGGREGATES[group]}([{v} {op} {u} for {v}, {u} in zip({xs}, {ys})])"
    return Draft(word + group, doc, ((xs, "list"), (ys, "list")), (line,))


def span(rng: random.Random, names: Names) -> Draft:
    xs = names.fresh("list")
    word, op = rng.choice((("minus", "-"), ("plus", "+")))
    group, other = rng.choice((("largest", "smallest"), ("smallest", "largest")))
    doc = f"Return the {group} of {xs} {word} the {other}."
    return Draft(word, doc, ((xs, "list"),), (f"return {AGGREGATES[group]}({xs}) {op} {AGGREGATES[other]}({xs})",))


def conditional_expression(rng: random.Random, names: Names) -> Draft:
    x, k, a, b = (names.fresh("argument") for _ in range(4))
    word, op = rng.choice(COMPARISONS)
    doc = f"Choose {a} if {x} is {word} {k}, else {b}."
    return Draft(word, doc, ((x, "int"), (k, "int"), (a, "int"), (b, "int")), (f"return {a} if {x} {op} {k} else {b}",))


def scan(rng: random.Random, names: Names) -> Draft:
    xs, v, t = names.fresh("list"), names.fresh("argument"), names.fresh("local")
    word, op = rng.choice((("largest", ">"), ("smallest", "<")))
    doc = f"Loop for the {word} of {xs}."
    lines = (f"{t} = {xs}[0]", f"for {v} in {xs}:", f"    if {v} {op} {t}:", f"        {t} = {v}", f"return {t}")
    return Draft(word, doc, ((xs, "list"),), lines)


def between(rng: random.Random, names: Names) -> Draft:
    x, low, high = (names.fresh("argument") for _ in range(3))
    (word, op), (word2, op2) = rng.choice(COMPARISONS), rng.choice(COMPARISONS)
    doc = f"Tell if {x} is {word} {low} and {word2} {high}."
    lines = (f"if {x} {op} {low}:", f"    return {x} {op2} {high}", "return False")
    return Draft(word + word2, doc, ((x, "int"), (low, "int"), (high, "int")), lines)


def two_values(rng: random.Random, names: Names) -> Draft:
    a, b, c, d = (names.fresh("argument") for _ in range(4))
    t, u = names.fresh("local"), names.fresh("local")
    (word, op), (word2, op2) = rng.choice(OPERATIONS), rng.choice(OPERATIONS)
    group, function = rng.choice((("larger", "max"), ("smaller", "min")))
    doc = f"Return the {group} of {a} {word} {b} and {c} {word2} {d}."
    lines = (f"{t} = {a} {op} {b}", f"{u} = {c} {op2} {d}", f"return {function}({t}, {u})")
    return Draft(word + word2, doc, ((a, "int"), (b, "int"), (c, "int"), (d, "int")), lines)


HELD_OUT: tuple[Template, ...] = (
    clamp,
    find_first,
    zip_aggregate,
    span,
    conditional_expression,
    scan,
    between,
    two_values,
)
