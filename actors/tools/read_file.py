"""read_file: a text file as it is, so that what is shown can be quoted in edit_file.

No line numbers are put in. CRLF and a byte-order mark are part of the text (edit_file matches with or without them); a
byte that is no UTF-8 shows as the Latin-1 character of its value. Whole lines are shown up to the caps; only a single
line longer than the cap is cut, and said to be.
"""

from typing import Annotated

import msgspec

from odradek.actors.tools.errors import BadArguments, WrongKind
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.redact import redact
from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import decode, is_binary, split_lines, utf8_prefix


class ReadFile(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of read_file."""

    path: Annotated[str, msgspec.Meta(description="File to read, relative to the workspace")]
    offset: Annotated[int, msgspec.Meta(ge=1, description="First line to show, from 1")] = 1
    limit: Annotated[int, msgspec.Meta(ge=1, description="Lines to show at most")] | None = None


async def run(context: Context, arguments: ReadFile) -> Answer:
    """The lines asked for, with a marker line if there are more after them."""
    path = arguments.path
    content = await context.workspace.read(path, context.limits.file_bytes)
    if is_binary(content):
        raise WrongKind(f"{path} is a binary file of {len(content)} bytes; look at it with run_terminal")
    text = decode(content)
    if "PRIVATE KEY" in text:  # a page of a key file shows neither its first nor its last line
        text = redact(text)
    lines = split_lines(text)
    if arguments.offset > max(len(lines), 1):
        raise BadArguments(f"offset {arguments.offset} is past the end; {path} has {len(lines)} lines")
    return Answer(_page(lines, arguments.offset, arguments.limit, context.limits))


def _page(lines: list[str], offset: int, limit: int | None, limits: Limits) -> str:
    shown: list[str] = []
    size, note = 0, ""
    for line in lines[offset - 1 : offset - 1 + min(limit or limits.read_lines, limits.read_lines)]:
        size += len(line.encode())
        if size > limits.output_bytes:
            if not shown:
                cut = utf8_prefix(line, limits.output_bytes)
                shown.append(redact(line, 0, len(cut)) + "\n")
                note = f", line {offset} cut at {len(cut)} of {len(line)} characters"
            break
        shown.append(line)
    text, last = "".join(shown), offset + len(shown) - 1
    if not note:
        text = redact(text)
        if last >= len(lines):
            return text
    more = f"; read on with offset={last + 1}" if last < len(lines) else ""
    return f"{text}[truncated: lines {offset}-{last} of {len(lines)}{note}{more}]"


TOOL = ToolSpec(
    name="read_file",
    description="Show a text file, or the lines from `offset` on.",
    arguments=ReadFile,
    effect="pure",
    leaves_delta=False,
    run=run,
)
