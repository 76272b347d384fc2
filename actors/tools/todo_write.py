"""todo_write: replace the session's to-do list; every item comes back with an id of its own.

The list is not on the file tree: it lives in the session's state, and the result's text is its only record.
"""

from typing import Annotated

import msgspec

from odradek.actors.tools.errors import BadArguments
from odradek.actors.tools.spec import Answer, Context, Todo, ToolSpec

STATUSES = ("pending", "in_progress", "completed", "cancelled")

ITEMS_MAX = 200
"""Longest list; a longer one is a plan nobody follows, and fills the context."""


class TodoItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item as the model writes it; without an id it gets one."""

    id: str | int = ""
    content: str
    status: str = "pending"


class TodoWrite(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of todo_write."""

    items: Annotated[list[TodoItem], msgspec.Meta(description="The whole list, as JSON: id?, content, status")]


async def run(context: Context, arguments: TodoWrite) -> Answer:
    """The list as JSON. Nothing else remembers it: it is on the log, as every result is."""
    if len(arguments.items) > ITEMS_MAX:
        raise BadArguments(f"todo_write: at most {ITEMS_MAX} items")
    for item in arguments.items:
        if item.status not in STATUSES:
            raise BadArguments(f"todo_write: status {item.status[:40]!r} is none of {', '.join(STATUSES)}")
    return Answer(msgspec.json.encode(with_ids(arguments.items)).decode())


def with_ids(items: list[TodoItem]) -> list[Todo]:
    """Every item, in order, with distinct ids: a blank or repeated id is replaced by a free number."""
    given = {str(item.id).strip() for item in items}
    numbers = (str(number) for number in range(1, 2 * len(items) + 2) if str(number) not in given)
    used: set[str] = set()
    todos = []
    for item in items:
        own = str(item.id).strip()
        if not own or own in used:
            own = next(numbers)
        used.add(own)
        todos.append(Todo(own, item.content, item.status))
    return todos


TOOL = ToolSpec(
    name="todo_write",
    description="Replace the list of things to do.",
    arguments=TodoWrite,
    effect="workspace",
    leaves_delta=False,
    run=run,
)
