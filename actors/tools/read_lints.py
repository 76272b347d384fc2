"""read_lints: what is plainly wrong with Python files, as `path:LINE: message`, without running anything of them.

The checks are our own (`python_lint.py`) and run in the helper process on the host, so that the answer is the same in
production and in training, whatever the image has installed, and so that a call said to be pure can't start a program
the agent has planted.
"""

from typing import Annotated

import msgspec

from odradek.actors.tools.errors import WrongKind
from odradek.actors.tools.helper import HelperLost, HelperRefused, call_helper
from odradek.actors.tools.limits import MIB
from odradek.actors.tools.paths import relative
from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import cap_lines, show_name
from odradek.actors.tools.walk import Walked, walk_files

SOURCE_BYTES = MIB
"""Largest file checked; compiling takes some hundred times its size in memory."""

SECONDS = 5.0
"""CPU seconds for one file. Too low: large honest files fail; too high: hostile ones hold the helper."""


class ReadLints(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of read_lints."""

    path: Annotated[str, msgspec.Meta(description="Python file or directory, relative to the workspace")] = "."


async def run(context: Context, arguments: ReadLints) -> Answer:
    """Findings in path and line order."""
    limits, start = context.limits, relative(arguments.path, context.workspace.mount)
    walked, findings, scanned = Walked(), list[str](), 0
    async for path, entry in walk_files(context.workspace, start, limits, walked):
        if not path.endswith((".py", ".pyi")):
            if path == start:
                raise WrongKind(f"{path} is not a Python file; only Python is checked")
            continue
        scanned += entry.size
        if scanned > limits.scan_bytes or len(findings) > limits.hits:
            walked.complete = False
            break
        findings += await _check(context, path, entry.size)
    if not walked.complete:
        findings.append("[not all files were checked; pass a narrower path]")
    return Answer(cap_lines(findings, limits.hits, limits.output_bytes, "pass a narrower path") or "no findings")


async def _check(context: Context, path: str, size: int) -> list[str]:
    name = show_name(path)
    if size > SOURCE_BYTES:
        return [f"{name}:1: not checked: {size} bytes are too many"]
    source = await context.workspace.read(path, SOURCE_BYTES)
    try:
        found, _ = await call_helper("lint", (source, path.endswith("__init__.py")), SECONDS)
    except (HelperLost, HelperRefused):
        return [f"{name}:1: not checked: too deeply nested, or too slow to compile"]
    return [f"{name}:{line}: {message}" for line, message in found]


TOOL = ToolSpec(
    name="read_lints",
    description="Check Python files for errors without running them.",
    arguments=ReadLints,
    effect="pure",
    leaves_delta=False,
    run=run,
)
