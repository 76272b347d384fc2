"""Whether a schema may follow another inside a major version: FULL_TRANSITIVE, over every schema ever published.

Full means both ways: new readers read old records and old readers read new ones. What is left to a change is to add a
field with a default. A field taken away, a new required one, another type, another default (old records leave defaults
out) or another set of allowed words is a new version of the event type, with an upcaster. Pure.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
PROSE = frozenset({"description", "title", "$id", "$schema", "examples"})
"""Keywords that say nothing about bytes."""


def breaks(old: Schema, new: Schema) -> list[str]:
    """What an old reader or an old record would not survive; empty if the change is allowed."""
    return list(dict.fromkeys(_compare(old, new, old, new, "value", frozenset())))


def _compare(
    old: Any, new: Any, old_root: Schema, new_root: Schema, path: str, seen: frozenset[tuple[str, str]]
) -> Iterator[str]:
    old_name, new_name = old.get("$ref", ""), new.get("$ref", "")
    if old_name and (old_name, new_name) in seen:
        return
    seen |= {(old_name, new_name)}
    left, right = _resolved(old, old_root), _resolved(new, new_root)
    yield from _fields(left, right, path)
    for name, prior in left.get("properties", {}).items():
        if name in right.get("properties", {}):
            following = right["properties"][name]
            yield from _compare(prior, following, old_root, new_root, f"{path}.{name}", seen)
    for keyword in ("items", "additionalProperties"):
        if isinstance(left.get(keyword), dict) and isinstance(right.get(keyword), dict):
            yield from _compare(left[keyword], right[keyword], old_root, new_root, f"{path}[]", seen)
    for keyword in ("anyOf", "prefixItems"):
        pairs = zip(left.get(keyword, ()), right.get(keyword, ()), strict=False)
        for index, (prior, following) in enumerate(pairs):
            yield from _compare(prior, following, old_root, new_root, f"{path}<{index}>", seen)


def _resolved(schema: Any, root: Schema) -> Schema:
    """A reference replaced by what it names; keywords beside it (a default) stay."""
    if "$ref" not in schema:
        return dict(schema)
    beside = {name: value for name, value in schema.items() if name != "$ref"}
    named: Schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    return named | beside


def _fields(old: Schema, new: Schema, path: str) -> Iterator[str]:
    gone = old.get("properties", {}).keys() - new.get("properties", {}).keys()
    yield from (f"{path}.{name} is gone" for name in sorted(gone))
    required, was_required = set(new.get("required", ())), set(old.get("required", ()))
    yield from (f"{path}.{name} became required" for name in sorted(required - was_required))
    yield from (f"{path}.{name} is no longer required" for name in sorted(was_required - required))
    nested = {"properties", "required", "items", "additionalProperties", "anyOf", "prefixItems", "$defs"}
    for keyword in sorted((old.keys() | new.keys()) - nested - PROSE):
        if old.get(keyword) != new.get(keyword):
            yield f"{path}: {keyword} was {old.get(keyword)!r}, is {new.get(keyword)!r}"
    for keyword in ("anyOf", "prefixItems"):
        if len(old.get(keyword, ())) != len(new.get(keyword, ())):
            yield f"{path}: {keyword} had {len(old.get(keyword, ()))} choices, has {len(new.get(keyword, ()))}"
    for keyword in ("items", "additionalProperties"):
        if isinstance(old.get(keyword), dict) != isinstance(new.get(keyword), dict):
            yield f"{path}: {keyword} was {old.get(keyword)!r}, is {new.get(keyword)!r}"
