"""write_file: put a whole file in place, literally, with missing parent directories."""

from typing import Annotated

import msgspec

from odradek.actors.tools import diff
from odradek.actors.tools.errors import BadArguments, NoSuchFile, TooLarge
from odradek.actors.tools.redact import MARK
from odradek.actors.tools.spec import Answer, Context, Display, ToolSpec
from odradek.actors.tools.text import decode, is_binary


class WriteFile(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of write_file."""

    path: Annotated[str, msgspec.Meta(description="File to write, relative to the workspace")]
    content: Annotated[str, msgspec.Meta(description="The whole new content, taken literally")]


async def run(context: Context, arguments: WriteFile) -> Answer:
    """`ok`, and the diff for a person."""
    try:
        content = arguments.content.encode()
    except UnicodeEncodeError as error:
        raise BadArguments("write_file: content has half of a character (a lone surrogate)") from error
    before = await _before(context, arguments.path)
    if MARK.search(arguments.content) and not MARK.search(decode(before or b"")):
        raise BadArguments(
            "write_file: content has a [redacted:…] mark, which would overwrite the hidden text; change only the "
            "lines around it with edit_file"
        )
    await context.workspace.write(arguments.path, content)
    if is_binary(before or b""):
        return Answer("ok")
    return Answer("ok", Display("diff", arguments.path, diff.unified(arguments.path, before, content)))


async def _before(context: Context, path: str) -> bytes | None:
    try:
        return await context.workspace.read(path, context.limits.file_bytes)
    except NoSuchFile:
        return None
    except TooLarge:
        return b"\0"


TOOL = ToolSpec(
    name="write_file",
    description="Create or replace a file.",
    arguments=WriteFile,
    effect="workspace",
    leaves_delta=True,
    run=run,
)
