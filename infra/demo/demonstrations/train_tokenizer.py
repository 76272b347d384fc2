"""Makes `words.json` and `tokenizer.json`: `python -m odradek.infra.demo.demonstrations.train_tokenizer`.

Deterministic: the same inputs give the same bytes. The tokenizer is trained on demonstrations of the set `train` with
names of plain words and syllables (its own pieces are not known yet) and on ordinary words; no held-out word or
template is in the corpus. Text is split first so that a name is cut the same way wherever it stands: keywords carry
the spaces, a newline takes its indentation, digits stand alone.
"""

import argparse
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from odradek.actors.policy.template import SPECIALS, XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.infra.demo.demonstrations.drills import drill
from odradek.infra.demo.demonstrations.scripted import Habits, demonstration
from odradek.infra.demo.demonstrations.segments import Segment
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH
from odradek.infra.demo.family import names
from odradek.infra.demo.family.names import WordLists, is_held_out
from odradek.infra.demo.family.sets import make_task

TOKENIZER_SEED = 1
"""Seed of the corpus's tasks."""

VOCABULARY = 1024
"""Token ids: 32 specials, 256 bytes, the rest merges. More would leave rarely used, badly trained rows."""

CORPUS_TASKS = 2500
"""Tasks whose texts train the merges; more changes few merges."""

CORPUS_HABITS = Habits(max_turns=8)
"""Sessions of the corpus: longer than the demo's, so that failed runs and errors are well represented."""

CORPUS_WORD_LISTS = 200
"""Lists of twenty ordinary words added to the corpus, so that common syllables become pieces."""

_KEYWORDS = """
return Return Give Take Loop Tell Check Pick Sort Find Choose def if else for in not and or the of is it each that
are all any to up by at with without from then when otherwise first second third last item largest smallest larger
smaller sum number len max min range sorted reverse True False plus minus times modulo divided above below least
most equal kept but integers ends starts followed upper lower case present missing fix got want startswith endswith
test zip passed failed echo repeat read find edit swap
"""
KEYWORDS: tuple[str, ...] = tuple(sorted(set(_KEYWORDS.split()), key=lambda word: (-len(word), word)))
"""Words that carry the spaces round them, and so are one token wherever they stand."""

FIXED_TEXT = (
    r"python test\.py",
    r"error: ",
    r"old text found ",
    r" times; nearest line ",
    r" times; quote more of it",
    r"no such file ",
    r"no match",
    r"\[exit [01]\]",
    r": got ",
    r", want ",
    r"test_",
    r"\.py",
)
"""Runs of tool output and file names that always stand together."""

PRE_SPLIT = "|".join(
    (
        r'\):\n    """',
        r'\.?"""\n    ',
        r"\n *",
        *FIXED_TEXT,
        rf" ?\b(?:{'|'.join(KEYWORDS)})\b ?",
        r"[a-z]+",
        r"[A-Z][a-z]*",
        r"[0-9]",
        r" ?[<>=!+*/%-]+ ?",
        r", ",
        r": ",
        r" +",
        r".",
    )
)
"""Cut points of the tokenizer: merges never cross one."""


def build(texts: Iterator[str] | Sequence[str], vocabulary: int = VOCABULARY) -> str:
    """A `tokenizer.json` trained on texts."""
    tokenizer = HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str(pretty=True)


def corpus(words: WordLists, tasks: int = CORPUS_TASKS) -> Iterator[str]:
    """The texts of demonstrations and drills between their special tokens, and ordinary words."""
    template = XmlTemplate(Tokenizer(build([], vocabulary=len(SPECIALS) + 256)))
    for index in range(tasks):
        rng = random.Random(f"tokenizer-{index}")
        task = make_task("train", TOKENIZER_SEED, index, words)
        for segments in (demonstration(rng, task, template, CORPUS_HABITS, words), drill(rng, template, words)):
            yield from _texts(segments, template.tokenizer)
    rng = random.Random("tokenizer-words")
    for _ in range(CORPUS_WORD_LISTS):
        yield " ".join(rng.sample(words.english, 20))


def _texts(segments: Sequence[Segment], tokenizer: Tokenizer) -> Iterator[str]:
    run: list[int] = []
    for token in (token for segment in segments for token in segment.token_ids):
        if tokenizer.special_name(token) is None:
            run.append(token)
        elif run:
            yield tokenizer.decode(run)
            run = []


def pieces(tokenizer: Tokenizer) -> list[str]:
    """The tokens that are 2 to 5 lower-case letters and no keyword: material for generated names."""
    decoded = (tokenizer.decode([number]) for number in range(tokenizer.vocab_size))
    return sorted({piece for piece in decoded if re.fullmatch("[a-z]{2,5}", piece) and piece not in KEYWORDS})


def english_words() -> list[str]:
    """Words of 3 to 9 letters in at least three modules of this Python's standard library (input, run once)."""
    counts: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        counts.update(set(re.findall(r"(?<![A-Za-z])[a-z]{3,9}(?![a-z])", text)))
    return sorted(word for word, n in counts.items() if n >= 3 and word not in names.RESERVED and not is_held_out(word))


def main() -> None:
    """Write both files; the list of ordinary words is kept unless it is asked for anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rescan-words", action="store_true", help="take the ordinary words anew from this Python")
    arguments = parser.parse_args()
    english = english_words() if arguments.rescan_words else names.shipped_words().english
    data = build(corpus(WordLists(english, [])))
    TOKENIZER_PATH.parent.mkdir(parents=True, exist_ok=True)
    TOKENIZER_PATH.write_text(data + "\n", encoding="utf-8")
    lists = {"english": english, "pieces": pieces(Tokenizer(data))}
    names.WORDS_PATH.write_text(json.dumps(lists, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{Tokenizer(data).vocab_size} tokens; {len(english)} words, {len(lists['pieces'])} pieces")


if __name__ == "__main__":
    main()
