"""glob: paths of files that match a pattern in the manner of .gitignore.

`*.py` matches at any depth, `src/*.py` only directly in `src`, `**` any number of directories, and a directory's name
all files below it. Matching runs in the helper process: a pattern with many stars can take for ever.
"""

import posixpath
from typing import Annotated

import msgspec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from odradek.actors.tools.errors import BadArguments, PatternFailed
from odradek.actors.tools.helper import HelperLost, HelperRefused, call_helper
from odradek.actors.tools.paths import relative
from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import cap_lines, show_name
from odradek.actors.tools.walk import Walked, walk_files


class Glob(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of glob."""

    pattern: Annotated[str, msgspec.Meta(description="Such as *.py, src/**/test_*.py or docs")]
    path: Annotated[str, msgspec.Meta(description="Directory to search below, relative to the workspace")] = "."


async def run(context: Context, arguments: Glob) -> Answer:
    """Matching paths, sorted, one a line."""
    limits, start = context.limits, relative(arguments.path, context.workspace.mount)
    expression = _expression(arguments.pattern)
    walked, paths = Walked(), []
    async for path, _ in walk_files(context.workspace, start, limits, walked):
        if "\n" not in path:
            paths.append(path)
    below = [posixpath.basename(path) if path == start else posixpath.relpath(path, start) for path in paths]
    try:
        answer, _ = await call_helper("search", (expression, ["\n".join(below)], len(paths)), limits.pattern_seconds)
    except (HelperLost, HelperRefused) as error:
        raise PatternFailed(f"the pattern can't be matched in time; use fewer stars ({error})") from error
    ((hits, _),) = answer
    found = sorted(show_name(paths[number - 1]) for number, _, _ in hits if paths)
    if not walked.complete:
        found.append(f"[searched only the first {limits.scan_files} entries; pass a narrower path]")
    return Answer(cap_lines(found, limits.hits, limits.output_bytes, "narrow the pattern or the path") or "no match")


def _expression(pattern: str) -> str:
    try:
        expression, include = GitIgnoreSpecPattern.pattern_to_regex(pattern.strip())
    except ValueError as error:
        raise BadArguments(f"glob: pattern {pattern[:80]!r} is not valid: {error}") from error
    if not expression or not include:
        raise BadArguments(f"glob: pattern {pattern[:80]!r} matches nothing (empty, a comment, or negated)")
    return str(expression)


TOOL = ToolSpec(
    name="glob",
    description="Find files by a pattern of their path.",
    arguments=Glob,
    effect="pure",
    leaves_delta=False,
    run=run,
)
