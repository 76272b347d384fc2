"""The ten tools by name, and the one way to run a call.

`run_call` gives exactly one result for every call: an unknown tool, wrong arguments, a refusal and even a defect in a
tool come back as a result marked as error, because a turn whose call has no result can't be continued. Only a failure
of the environment (`SandboxError`) passes through: it says nothing about the call, so the model must not see it.
"""

import logging
from collections.abc import Callable, Mapping

from odradek.actors.environment.errors import SandboxError
from odradek.actors.tools import (
    edit_file,
    glob,
    grep,
    list_dir,
    read_file,
    read_lints,
    run_terminal,
    semantic_search,
    todo_write,
    write_file,
)
from odradek.actors.tools.arguments import parse
from odradek.actors.tools.errors import ToolError, UnknownTool
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.redact import MARK, redact
from odradek.actors.tools.spec import Answer, Context, Display, Effect, ToolOutcome, ToolSpec
from odradek.actors.tools.text import utf8_prefix
from odradek.actors.tools.workspace import Workspace

log = logging.getLogger(__name__)

TOOLS: dict[str, ToolSpec] = {
    module.TOOL.name: module.TOOL
    for module in (
        read_file,
        list_dir,
        glob,
        grep,
        semantic_search,
        edit_file,
        write_file,
        run_terminal,
        read_lints,
        todo_write,
    )
}


async def run_call(
    workspace: Workspace,
    name: str,
    arguments: Mapping[str, str],
    limits: Limits,
    on_output: Callable[[str], None] | None = None,
) -> ToolOutcome:
    """The result of one call; raises nothing but `SandboxError` (and cancellation)."""
    spec = TOOLS.get(name)
    effect: Effect = spec.effect if spec is not None else "pure"
    try:
        if spec is None:
            raise UnknownTool(f"there is no tool {name[:80]!r}; there are {', '.join(TOOLS)}")
        parsed = parse(name, spec.arguments, arguments)
        answer = await spec.run(Context(workspace, limits, on_output), parsed)
        return _outcome(answer, effect, limits)
    except SandboxError:
        raise
    except ToolError as error:
        return _error(str(error), effect, limits)
    except Exception as error:
        log.exception("tool %s failed", name[:80])
        return _error(f"{name[:80]} failed inside ({type(error).__name__}); try another way", effect, limits)


def _outcome(answer: Answer, effect: Effect, limits: Limits) -> ToolOutcome:
    text, display = redact(answer.text), answer.display
    if display is not None:
        body = redact(display.body)
        shown = utf8_prefix(body, limits.display_bytes)
        note = "" if shown == body else f"\n[cut: {len(shown)} of {len(body)} characters]"
        display = Display(display.kind, redact(display.title), shown + note)
    return ToolOutcome(text, False, effect, display, len(MARK.findall(text)))


def _error(message: str, effect: Effect, limits: Limits) -> ToolOutcome:
    text = redact(utf8_prefix(f"error: {message}", limits.output_bytes))
    return ToolOutcome(text, True, effect, None, len(MARK.findall(text)))
