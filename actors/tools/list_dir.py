"""list_dir: the names in one directory, sorted, directories with a trailing slash."""

from typing import Annotated

import msgspec

from odradek.actors.tools.spec import Answer, Context, ToolSpec
from odradek.actors.tools.text import cap_lines, show_name


class ListDir(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of list_dir."""

    path: Annotated[str, msgspec.Meta(description="Directory, relative to the workspace")] = "."


async def run(context: Context, arguments: ListDir) -> Answer:
    """One name a line."""
    entries = await context.workspace.list(arguments.path)
    names = [show_name(entry.name) + ("/" if entry.kind == "directory" else "") for entry in entries]
    if not names:
        return Answer("[empty directory]")
    limits = context.limits
    return Answer(cap_lines(names, limits.hits, limits.output_bytes, "use glob with a pattern for the rest"))


TOOL = ToolSpec(
    name="list_dir",
    description="List the names in a directory.",
    arguments=ListDir,
    effect="pure",
    leaves_delta=False,
    run=run,
)
