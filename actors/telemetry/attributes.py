"""Attribute values as every collector takes them: scalars or short text, bounded, without secrets.

Guarantees: a mapping or a mixed list becomes JSON text instead of vanishing; None is left out; text longer than
`MAX_TEXT` is cut, and its full size stands beside it; a span's attributes together stay below `MAX_SPAN`, and text is
valid UTF-8, so that no span can lose the batch it is sent in; a value under a secret-sounding key is masked, and every
text goes through the caller's `redact`. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from odradek.actors.telemetry.semconv import ORIGINAL_SIZE_SUFFIX

MAX_TEXT = 4096
"""Bytes of one attribute, in UTF-8. Too low hides what a tool said; too high makes backends refuse the span."""
MAX_SPAN = 32_768
"""Bytes of all of a span's attributes. With `exporter.BATCH` spans a request stays near 2 MiB, below what
collectors accept (20 MiB by HTTP, 4 MiB by gRPC behind them)."""
MAX_KEYS = 48
"""Attributes of one span, each perhaps with its size beside it; the collectors' usual bound is 128."""
MAX_KEY = 200
"""Bytes of a name; a longer one is cut."""
MAX_LIST = 32
"""Numbers that stay a list; a longer one becomes text, which is cut like any other."""
MAX_WORDS = 128
"""Characters of a list of words that stays a list."""
SCALAR_SIZE = 16 * MAX_LIST
"""What a number or a list of them counts for in `MAX_SPAN`: an upper bound."""
LOOKED_AT = 4 * MAX_TEXT
"""Characters of a text that are looked at for secrets: of a giant one only a little more than what is kept."""
MASK = "[redacted]"

_SECRET = re.compile(r"pass(word|wd|phrase)?$|secret|token$|api[_-]?key|credential|authorization|private[_-]?key", re.I)

Value = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Redact = Callable[[str], str]


def clean(attributes: Mapping[str, Any], redact: Redact = str) -> dict[str, Value]:
    """See the module."""
    out: dict[str, Value] = {}
    left = MAX_SPAN
    for key, value in list(attributes.items())[:MAX_KEYS]:
        if value is None:
            continue
        name = utf8(key)[:MAX_KEY].decode("utf-8", "ignore")
        plain = MASK if _SECRET.search(key.rpartition(".")[2]) else _plain(value)
        if isinstance(plain, str):
            text = utf8(redact(plain[:LOOKED_AT]))
            limit = min(MAX_TEXT, max(0, left - len(name)))
            if len(plain) > LOOKED_AT or len(text) > limit:
                out[name + ORIGINAL_SIZE_SUFFIX] = len(utf8(plain))
            plain = text[:limit].decode("utf-8", "ignore")
            left -= len(text[:limit])
        else:
            left -= SCALAR_SIZE
        out[name] = plain
        left -= len(name)
    return out


def utf8(text: str) -> bytes:
    """Its bytes; lone surrogates, which no collector takes, are replaced."""
    return text.encode("utf-8", "replace")


def _plain(value: Any) -> Value:
    """A scalar, a short list of scalars of one type, or text."""
    match value:
        case bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return f"{len(value)} bytes"
        case list() | tuple() if len(value) <= MAX_LIST and _numbers(value):
            return list(value)
        case list() | tuple() if _words(value):
            return [utf8(item).decode() for item in value]
    return json.dumps(_masked(value), ensure_ascii=False, default=str)


def _numbers(items: Sequence[Any]) -> bool:
    return len({type(item) for item in items}) <= 1 and all(isinstance(item, int | float) for item in items)


def _words(items: Sequence[Any]) -> bool:
    """Few short texts, as for gen_ai.response.finish_reasons: a list that needs neither cutting nor redacting."""
    return all(isinstance(item, str) and item.isidentifier() for item in items) and sum(map(len, items)) < MAX_WORDS


def _masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): MASK if _SECRET.search(str(k)) else _masked(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item) for item in value]
    return value
