"""What a fork takes over of its parent. Pure.

A fork at turn T holds what the parent's turn T was sampled from: the turns before it with their calls, results and
deltas, and the messages that those turns and T's own prompt held; T itself is sampled anew. T one past the parent's
last turn takes all of it. What the parent sampled is context here (`TurnSampled.copied_from`): it is trained once, in
the parent, if at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from odradek.actors.session.errors import ForkPointError
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import (
    ContextSummarized,
    MessageReceived,
    SessionEvent,
    ToolCompleted,
    ToolRequested,
    TurnSampled,
)
from odradek.streams.ownership import SessionRecord, accepted


def inherited(opened: RecordRef, records: Iterable[SessionRecord], at: int) -> list[SessionEvent]:
    """The events to log again, in order. `records`: the parent's, from the one at `opened` on.

    Raises ForkPointError if the parent has no such turn, or cannot be read.
    """
    taken_in = list(accepted(records))
    if any(meta.cipher is not None for _, _, meta, _ in taken_in):
        raise ForkPointError(f"the session at {opened} cannot be read any more: its subject was erased")
    counted = [(offset, body) for offset, _, _, body in taken_in]
    turns = {body.turn: (offset, body) for offset, body in counted if isinstance(body, TurnSampled)}
    if not 0 <= at <= len(turns):
        raise ForkPointError(
            f"the session at {opened} has turns 0 to {len(turns) - 1} on the log; it can be forked at 0 to "
            f"{len(turns)}, not at {at}"
        )
    end = turns[at][0] if at in turns else None
    before = [(offset, body) for offset, body in counted if end is None or offset < end]
    shown = {message for turn, (_, body) in turns.items() if turn <= at for message in body.messages}
    answered = {body.call_id for _, body in before if isinstance(body, ToolCompleted)}
    taken: list[SessionEvent] = []
    for offset, body in before:
        match body:
            case MessageReceived() if end is None or body.message_id in shown:
                taken.append(body)
            case TurnSampled():
                origin = body.copied_from or RecordRef(opened.topic, opened.partition, offset)
                taken.append(msgspec.structs.replace(body, copied_from=origin))
            case ToolRequested() if body.call_id in answered:
                taken.append(body)
            case ToolCompleted() | ContextSummarized():
                taken.append(body)
            case _:
                pass
    return taken
