"""What a tool is: a schema, an effect, and a coroutine from arguments to text. Every tool file ends with a `ToolSpec`.

A tool's `run` returns an `Answer` or raises a `ToolError`; it knows nothing of calls, ids or the log.
`registry.run_call` is the one place that turns its result into a `ToolOutcome`.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from odradek.actors.tools.limits import Limits
from odradek.actors.tools.workspace import Workspace

Effect = Literal["pure", "workspace", "external"]
"""pure: changes nothing, so adjacent pure calls of a turn may run together. workspace: may change files or processes
of the workspace, so it is a barrier, and its delta is logged. external: reaches outside; none of the ten does."""


class Display(msgspec.Struct, frozen=True):
    """What a person is shown beside the model's text: a unified diff, or a command with its output."""

    kind: Literal["diff", "command"]
    title: str
    body: str


class Answer(msgspec.Struct, frozen=True):
    """A tool's result before redaction."""

    text: str
    display: Display | None = None


class Todo(msgspec.Struct, frozen=True):
    """One item of the session's list."""

    id: str
    content: str
    status: str


class Context(msgspec.Struct, frozen=True):
    """Everything a call may touch."""

    workspace: Workspace
    limits: Limits
    on_output: Callable[[str], None] | None = None
    """Takes a command's output as it comes, for a person watching; already redacted."""


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. `arguments` is its msgspec struct (the JSON schema comes from it)."""

    name: str
    description: str
    arguments: type[msgspec.Struct]
    effect: Effect
    leaves_delta: bool
    """False where the effect is not on the file tree (todo_write), so there is no workspace delta to log."""
    run: Callable[[Context, Any], Awaitable[Answer]]

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments, self-contained; like the tool, it takes no others."""
        (schema,), components = msgspec.json.schema_components([self.arguments], ref_template="#/$defs/{name}")
        root = {**components.pop(self.arguments.__name__), "additionalProperties": False}
        if components:
            root["$defs"] = components
        assert schema
        return root


class ToolOutcome(msgspec.Struct, frozen=True):
    """The one result of one call, as logged and as the model sees it."""

    text: str
    is_error: bool
    effect: Effect
    display: Display | None = None
    redactions: int = 0
    """Secrets hidden in `text`."""
