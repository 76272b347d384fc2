"""Identifiers: an unlimited generator for training, a closed list of held-out words for evaluation.

The generator mixes real words (from `words.json`), syllables, random letters and joined tokenizer pieces, so that a
policy has to copy a name instead of recalling it. It never yields a held-out word or its plural, a Python keyword or
builtin, a standard module (a workspace module of that name would not be imported), nor a word that the templates,
tools or drills use with a fixed meaning. Every search is bounded; nothing here reads a clock or the environment.
"""

import builtins
import keyword
import random
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from odradek.infra.demo.family.errors import NamesExhausted

_HELD_OUT_WORDS = """
ticket badge parcel engine wheel rocket planet comet orbit river lake ocean island bridge tower castle garden kettle
spoon plate bottle jacket button ribbon candle mirror carpet pencil marker folder badger falcon tiger zebra salmon
lemon pepper ginger walnut copper silver nickel marble gravel timber velvet cotton
"""
HELD_OUT_WORDS: tuple[str, ...] = tuple(_HELD_OUT_WORDS.split())
"""Never part of a training or new-combination task (set `unseen_identifiers` only), nor of the tokenizer's corpus."""

_FIXED_WORDS = """
return give take loop tell check pick sort find choose def if else for in not and or the of is it each that are all
any to up by at with without from then when otherwise first second third last item largest smallest larger smaller
sum number len max min range sorted reverse true false plus minus times modulo divided above below least most equal
kept but integers ends starts followed upper lower case present missing error python exit failed passed ok fix want
got startswith endswith test no match such file text found called zip nearest line lines old new quote more same
edit read repeat swap result echo fn py vals nums xs ys
"""
FIXED_WORDS: frozenset[str] = frozenset(_FIXED_WORDS.split())
"""Words with a fixed meaning in docstrings, tool output and drills; a name equal to one would be ambiguous."""

RESERVED: frozenset[str] = (
    FIXED_WORDS | set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins)) | sys.stdlib_module_names
)

MAX_TRIES = 1000
"""Draws before a search gives up. Far fewer than 20 are usual; too low fails on the 47 held-out words, too high
only delays the error when a pool really is empty."""

SINGLE_LETTERS = tuple("abcdknmpqrtuvwxyz")

NameKind = Literal["argument", "list", "function", "local"]


class WordLists(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`words.json`: ordinary words of Python sources, and the tokenizer's lower-case pieces of 2 to 5 letters."""

    english: list[str]
    pieces: list[str]


WORDS_PATH = Path(__file__).with_name("words.json")


@cache
def shipped_words() -> WordLists:
    """The word lists in the repository (made by `demonstrations.train_tokenizer`)."""
    return msgspec.json.decode(WORDS_PATH.read_bytes(), type=WordLists)


def is_held_out(word: str) -> bool:
    """Whether a word, or the word it is the plural of, is held out."""
    return word in _HELD_OUT or (word.endswith("s") and word[:-1] in _HELD_OUT)


_HELD_OUT = frozenset(HELD_OUT_WORDS)


def generated_word(rng: random.Random, words: WordLists) -> str:
    """One word of 2 to 10 letters that is neither reserved nor held out."""
    for _ in range(MAX_TRIES):
        word = _draw(rng, words)
        if 2 <= len(word) <= 10 and word not in RESERVED and not is_held_out(word):
            return word
    raise NamesExhausted(f"no usable word in {MAX_TRIES} draws; are the word lists empty?")


def _draw(rng: random.Random, words: WordLists) -> str:
    kind = rng.random()
    if kind < 0.35 and words.pieces:
        return "".join(rng.choice(words.pieces) for _ in range(rng.choice((1, 1, 2, 2, 2, 2, 3, 3))))
    if kind < 0.60:
        syllables = rng.choice((1, 2, 2, 2, 3))
        return "".join(
            rng.choice("bcdfghjklmnprstvwyz") + rng.choice("aeiou") + rng.choice(("", "", "n", "r", "s", "l", "t"))
            for _ in range(syllables)
        )
    if kind < 0.88:
        return rng.choice(words.english)
    if kind < 0.94:
        return rng.choice(words.english)[: rng.choice((3, 4, 5))] + rng.choice(words.english)[-rng.choice((2, 3, 4)) :]
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.choice((2, 3, 4, 5))))


class Names:
    """Fresh names of one task: no two of them equal while both are in scope."""

    def __init__(self, rng: random.Random, words: WordLists, held_out: bool = False) -> None:
        self._rng = rng
        self._words = words
        self._held_out = held_out
        self._used: set[str] = set()

    def mark(self) -> frozenset[str]:
        """The names in use now, for `rewind`."""
        return frozenset(self._used)

    def rewind(self, mark: frozenset[str], keep: str | None = None) -> None:
        """Forget names taken since `mark` (a function's arguments end with it), except `keep`."""
        self._used = set(mark) if keep is None else {*mark, keep}

    def fresh(self, kind: NameKind) -> str:
        for _ in range(MAX_TRIES):
            name = self._candidate(kind)
            if name not in self._used and name not in RESERVED:
                self._used.add(name)
                return name
        raise NamesExhausted(f"no unused {kind} name in {MAX_TRIES} draws with {len(self._used)} names in use")

    def _word(self) -> str:
        return self._rng.choice(HELD_OUT_WORDS) if self._held_out else generated_word(self._rng, self._words)

    def _candidate(self, kind: NameKind) -> str:
        choice = self._rng.random()
        if kind == "argument":
            if choice < 0.3:
                return self._rng.choice(SINGLE_LETTERS)
            return self._word() if choice < 0.95 else f"{self._word()}_{self._word()}"
        if kind == "list":
            return f"{self._word()}s"
        joined_from = 0.75 if kind == "function" else 0.9
        return self._word() if choice < joined_from else f"{self._word()}_{self._word()}"
