"""grep: lines that match a pattern, as `path:LINE:text`.

The pattern is a Python regular expression, or plain text where it is not a valid one; it is matched line by line. A
long line is shown as an excerpt around its match. Binary files are skipped. Expressions run in the helper process with
a CPU limit, since one that backtracks can't be stopped here. Secrets are hidden before the search decides what hits,
so a search can't be used to guess one.
"""

import re
from typing import Annotated

import msgspec

from odradek.actors.tools.errors import BadArguments, PatternFailed
from odradek.actors.tools.helper import HelperLost, HelperRefused, call_helper
from odradek.actors.tools.limits import MIB, Limits
from odradek.actors.tools.paths import relative
from odradek.actors.tools.redact import redact
from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import CUT_MARK, decode, is_binary, show_name, utf8_prefix
from odradek.actors.tools.walk import Walked, walk_files

BATCH_BYTES = MIB
"""Text sent to the helper at once. Too low: a round trip for each file; too high: memory held twice."""

_SPECIAL = re.compile(r"[\\^$.|?*+(){}\[\]]")

Hit = tuple[int, int, int]
"""Line from 1, start and end of the match in the line."""


class Grep(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of grep."""

    pattern: Annotated[str, msgspec.Meta(description="Regular expression, matched line by line")]
    path: Annotated[str, msgspec.Meta(description="File or directory, relative to the workspace")] = "."


class _Search:
    """One call: the matcher, what it found so far, and the CPU seconds it has left."""

    def __init__(self, pattern: str, limits: Limits) -> None:
        self._limits = limits
        self._expression, self._literal = pattern, None if _SPECIAL.search(pattern) else pattern
        self._seconds = limits.pattern_seconds
        self.lines: list[str] = []
        self.total = 0

    async def add(self, batch: list[tuple[str, str]]) -> None:
        """Search (path, text) pairs; those with a hit are searched again with their secrets hidden."""
        found = await self._match([text for _, text in batch])
        hidden = [(path, redact(text)) for (path, text), (hits, _) in zip(batch, found, strict=True) if hits]
        for (path, text), (hits, total) in zip(hidden, await self._match([t for _, t in hidden]), strict=True):
            self.total += total
            lines = text.split("\n")
            for hit in hits[: self._limits.hits - len(self.lines)]:
                line = excerpt(lines[hit[0] - 1].removesuffix("\r"), hit[1], self._limits.line_chars)
                self.lines.append(f"{show_name(path)}:{hit[0]}:{line}")

    async def _match(self, texts: list[str]) -> list[tuple[list[Hit], int]]:
        if self._literal is not None or not texts:
            return [find_literal(self._literal or "", text, self._limits.hits) for text in texts]
        try:
            arguments = (self._expression, texts, self._limits.hits)
            answer, used = await call_helper("search", arguments, self._seconds)
        except HelperRefused:
            self._literal = self._expression
            return await self._match(texts)
        except HelperLost as error:
            raise PatternFailed(
                f"the pattern needs more than {self._limits.pattern_seconds:g} s of CPU; simplify it, search for plain "
                "text, or pass a narrower path"
            ) from error
        self._seconds -= used
        found: list[tuple[list[Hit], int]] = answer
        return found


async def run(context: Context, arguments: Grep) -> Answer:
    """Hits in path order, capped, then what was left out and why."""
    if not arguments.pattern or "\n" in arguments.pattern:
        raise BadArguments("grep: the pattern is one line of text and not empty")
    limits, start = context.limits, relative(arguments.path, context.workspace.mount)
    search, walked, skipped, scanned = _Search(arguments.pattern, limits), Walked(), list[str](), 0
    batch: list[tuple[str, str]] = []
    size = 0
    async for path, entry in walk_files(context.workspace, start, limits, walked):
        if entry.size > limits.file_bytes:
            skipped.append(f"{show_name(path)} ({entry.size} bytes)")
            continue
        if scanned + entry.size > limits.scan_bytes:
            walked.complete = False
            break
        content = await context.workspace.read(path, limits.file_bytes)
        scanned += len(content)
        if not is_binary(content):
            batch.append((path, decode(content)))
            size += len(content)
        if size > BATCH_BYTES:
            await search.add(batch)
            batch, size = [], 0
    await search.add(batch)
    notes = []
    if skipped:
        notes.append(f"[not searched, too large: {', '.join(skipped[:5])}]")
    if not walked.complete:
        notes.append(f"[searched only {walked.files} files, {scanned} bytes; pass a narrower path]")
    return Answer(_report(search, limits, notes))


def _report(search: _Search, limits: Limits, notes: list[str]) -> str:
    shown: list[str] = []
    size = 0
    for line in search.lines:
        size += len(line.encode()) + 1
        if size > limits.output_bytes and shown:
            break
        shown.append(utf8_prefix(line, limits.output_bytes))
    if len(shown) < search.total:
        notes.insert(0, f"[truncated: {len(shown)} of {search.total} lines; narrow the pattern or pass path]")
    return "\n".join([*(shown or ["no match"]), *notes])


def find_literal(needle: str, text: str, keep: int) -> tuple[list[Hit], int]:
    """The first `keep` hits of plain text, one a line, and the number of lines that hit."""
    hits: list[Hit] = []
    total, number, counted = 0, 1, 0
    at = text.find(needle)
    while at >= 0:
        start, stop = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        number += text.count("\n", counted, start)
        counted = start
        total += 1
        if len(hits) < keep:
            hits.append((number, at - start, at - start + len(needle)))
        at = text.find(needle, stop) if stop >= 0 else -1
    return hits, total


def excerpt(line: str, start: int, limit: int) -> str:
    """The line, or about `limit` characters of it around the match, flagged with where it was cut."""
    if len(line) <= limit:
        return line
    first = max(0, min(start - limit // 3, len(line) - limit))
    last = min(len(line), first + limit)
    before, after = CUT_MARK if first else "", CUT_MARK if last < len(line) else ""
    where = f"[line cut: characters {first + 1}-{last} of {len(line)}]"
    return f"{before}{line[first:last]}{after} {where}"


TOOL = ToolSpec(
    name="grep",
    description="Search files for lines that match a regular expression.",
    arguments=Grep,
    effect="pure",
    leaves_delta=False,
    run=run,
)
