"""semantic_search: the places whose words fit a question best, by BM25 over identifiers split into words.

Lexical, and it says so in its first line: it finds `parse_header` for "header parsing", not for "read the preamble".
"""

import heapq
import math
import re
from collections import Counter
from typing import Annotated

import msgspec

from odradek.actors.tools.errors import BadArguments
from odradek.actors.tools.redact import redact
from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import cap_lines, cut_line, decode, is_binary, show_name
from odradek.actors.tools.walk import Walked, walk_files

FIRST_LINE = "lexical ranking (shared words, not meaning), best first:"

CHUNK_LINES = 30
"""Lines ranked as one place. Too low: words of one function fall apart; too high: a place says little."""

RESULTS = 10
"""Places shown."""

BM25_K1, BM25_B = 1.2, 0.75
"""The textbook's saturation of repeated words and correction for length."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
_STEM = re.compile(r"(?:ing|ed|es|s|er|e)$")


class SemanticSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of semantic_search."""

    query: Annotated[str, msgspec.Meta(description="What to look for, in words")]


class _Chunk(msgspec.Struct, frozen=True):
    path: str
    line: int
    lines: list[str]
    words: Counter[str]
    length: int


def words(text: str) -> list[str]:
    """Lower-case words of prose and identifiers, roughly stemmed.

    >>> words("parseHTTPHeaders(max_size=3)")
    ['pars', 'http', 'header', 'max', 'siz', '3']
    """
    found = (match.lower() for match in _WORD.findall(text))
    return [_STEM.sub("", word) if len(word) > 3 else word for word in found]


async def run(context: Context, arguments: SemanticSearch) -> Answer:
    """The best places as `path:LINE:text`, the line being the one with most of the query's words."""
    wanted = set(words(arguments.query))
    if not wanted:
        raise BadArguments("semantic_search: the query has no words")
    limits, walked, scanned = context.limits, Walked(), 0
    chunks: list[_Chunk] = []
    async for path, entry in walk_files(context.workspace, ".", limits, walked):
        if scanned + entry.size > limits.scan_bytes:
            walked.complete = False
            break
        content = await context.workspace.read(path, limits.scan_bytes)
        scanned += len(content)
        if not is_binary(content):
            chunks += _chunks(path, redact(decode(content)), wanted)
    ranked = ((score, -index) for index, score in enumerate(_scores(chunks, wanted)) if score > 0)
    best = heapq.nlargest(RESULTS, ranked)
    found = [_show(chunks[-index], wanted, limits.line_chars) for _, index in best]
    if not walked.complete:
        found.append(f"[searched only {walked.files} files, {scanned} bytes of the workspace]")
    shown = cap_lines(found, limits.hits, limits.output_bytes, "use other words") if found else "no match"
    return Answer(f"{FIRST_LINE}\n{shown}")


def _chunks(path: str, text: str, wanted: set[str]) -> list[_Chunk]:
    lines = text.split("\n")
    chunks = []
    for first in range(0, len(lines), CHUNK_LINES):
        part = lines[first : first + CHUNK_LINES]
        found = words(path + "\n" + "\n".join(part))
        kept = Counter(word for word in found if word in wanted)
        chunks.append(_Chunk(path, first + 1, part, kept, len(found)))
    return chunks


def _scores(chunks: list[_Chunk], wanted: set[str]) -> list[float]:
    average = sum(chunk.length for chunk in chunks) / max(1, len(chunks)) or 1.0
    weight = {}
    for word in wanted:
        having = sum(1 for chunk in chunks if word in chunk.words)
        weight[word] = math.log(1 + (len(chunks) - having + 0.5) / (having + 0.5))
    scores = []
    for chunk in chunks:
        norm = BM25_K1 * (1 - BM25_B + BM25_B * chunk.length / average)
        parts = (weight[w] * n * (BM25_K1 + 1) / (n + norm) for w, n in sorted(chunk.words.items()))
        scores.append(math.fsum(parts))
    return scores


def _show(chunk: _Chunk, wanted: set[str], limit: int) -> str:
    counts = [len(wanted.intersection(words(line))) for line in chunk.lines]
    best = counts.index(max(counts))
    return f"{show_name(chunk.path)}:{chunk.line + best}:{cut_line(chunk.lines[best], limit)}"


TOOL = ToolSpec(
    name="semantic_search",
    description="Find places in the workspace by words (lexical ranking).",
    arguments=SemanticSearch,
    effect="pure",
    leaves_delta=False,
    run=run,
)
