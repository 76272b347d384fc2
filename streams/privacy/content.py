"""What of an event is its subject's content, and an event with and without it.

Content is what a person said or what was made from it: texts, tokens, log-probs, arguments, results, files. Everything
else is structure (types, ids, order, offsets, counts, versions, verdicts as numbers) and stays readable for ever, so
that a log whose subject was erased still folds, verifies and is listed. `CONTENT` decides field by field; a test holds
that every text, bytes, list or map of these topics was decided on.

Without its content an event has the same shape: byte fields keep their length (zeros in place of tokens), so that
positions and counts stay true; texts are a mark that says why. Pure.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec

from odradek.streams.errors import DecodeError
from odradek.streams.events import rewards, sessions, subjects, tasks
from odradek.streams.events.meta import Cipher, Meta

B = TypeVar("B", bound=msgspec.Struct)

CONTENT: dict[type[msgspec.Struct], tuple[str, ...]] = {
    sessions.SessionOpened: ("files", "setup"),
    sessions.MessageReceived: ("text",),
    sessions.CancelRequested: ("reason",),
    sessions.TurnSampled: ("prompt", "completion", "logprobs", "experts"),
    sessions.ToolRequested: ("name", "arguments"),
    sessions.ToolCompleted: ("text", "delta"),
    sessions.ContextSummarized: ("prompt",),
    sessions.SessionFailed: ("cause",),
    rewards.RewardAssigned: ("tests_passed", "tests_failed", "notes"),
    rewards.RewardUngraded: ("cause",),
    rewards.RewardRevised: ("reason",),
    subjects.ConsentWithdrawn: ("reason",),
    tasks.FeedbackGiven: ("comment",),
}
"""By event type the fields that are encrypted when the event is somebody's."""

ERASED = "[erased]"
"""Stands for a text whose subject's key was destroyed."""
LOCKED = "[locked]"
"""Stands for a text of which this reader has no key."""

WITHHELD = "[withheld]"
"""Stands for the text of tokens that a reader could not see, for either reason."""

LONGEST = 64 * 1024 * 1024
"""Bytes of a field that a record may claim to have had. A record is smaller; a larger claim is a forgery."""

Reveal = Callable[[Meta], bytes | str]
"""The content bytes of an encrypted event, or the mark to show in their place. Raises DecodeError."""


def split(body: B) -> tuple[B, bytes, dict[str, int]] | None:
    """The body without its content, the content's bytes, and the fields they are of with the length of each byte field
    (0 for others). None if nothing in it is content."""
    kind, present, blanks, lengths = type(body), dict[str, Any](), dict[str, Any](), dict[str, int]()
    for name, _, blank in _fields(kind):
        value = getattr(body, name)
        if value != blank:
            present[name], blanks[name] = value, blank
            lengths[name] = len(value) if isinstance(value, bytes) else 0
    if not present:
        return None
    return msgspec.structs.replace(body, **blanks), msgspec.msgpack.encode(_holder(kind)(**present)), lengths


def joined(body: B, plain: bytes) -> B:
    """The body with its content. Raises DecodeError where it is no content of this type."""
    kind = type(body)
    try:
        content = msgspec.msgpack.decode(plain, type=_holder(kind))
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise DecodeError(f"the content is none of a {kind.__struct_config__.tag}") from None
    return msgspec.structs.replace(body, **{name: getattr(content, name) for name, *_ in _fields(kind)})


def withheld(body: B, lengths: dict[str, int], mark: str) -> B:
    """The body in its old shape, without its content."""
    changes: dict[str, Any] = {}
    for name, field_type, blank in _fields(type(body)):
        if name in lengths:
            if not 0 <= lengths[name] <= LONGEST:
                raise DecodeError(f"the record claims {lengths[name]} bytes of {name}")
            changes[name] = mark if blank == "" else bytes(lengths[name]) if field_type is bytes else blank
    return msgspec.structs.replace(body, **changes)


def revealed(meta: Meta, body: B, reveal: Reveal | None) -> tuple[Meta, B]:
    """An encrypted event as this reader may see it. `Meta.cipher` stays where the content does not."""
    cipher = meta.cipher
    assert cipher is not None
    found = LOCKED if reveal is None else reveal(meta)
    if isinstance(found, str):
        return meta, withheld(body, cipher.lengths, found)
    return msgspec.structs.replace(meta, cipher=None), joined(body, found)


def without(meta: Meta, box: bytes, lengths: dict[str, int]) -> Meta:
    """The meta of the event that is written instead; an empty box lies in the object store."""
    return msgspec.structs.replace(meta, cipher=Cipher(box=box, lengths=lengths))


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any, Any], ...]:
    """Name, type and empty value of each content field."""
    names = CONTENT.get(kind, ())
    return tuple((field.name, field.type, _blank(field.type)) for field in msgspec.structs.fields(kind)
                 if field.name in names)  # fmt: skip


def _blank(kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin in (Union, types.UnionType) and type(None) in get_args(kind):
        return None
    return {str: "", bytes: b"", dict: {}, list: []}[origin]


@cache
def _holder(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct of the content fields alone."""
    fields = [(name, field_type, _default(blank)) for name, field_type, blank in _fields(kind)]
    return msgspec.defstruct(f"{kind.__name__}Content", fields, frozen=True, kw_only=True, omit_defaults=True)


def _default(blank: Any) -> Any:
    return msgspec.field(default_factory=type(blank)) if blank in ({}, []) else blank
