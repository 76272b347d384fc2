"""A subject's name as one component of a path or object key."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from urllib.parse import quote

SHARED = "shared"
"""Stands for the subject of content that is nobody's."""

LONGEST = 120
"""Characters of an escaped name that still stands as it is; file systems allow 255 with what we add."""


@lru_cache(maxsize=10_000)
def folder_of(subject: str) -> str:
    """Different subjects have different names, and none is a prefix path of another's: `/` is escaped, and so are the
    few names that mean something else.

    >>> folder_of("ann@example.org"), folder_of("a/b"), folder_of(".."), folder_of("shared")
    ('ann@example.org', 'a%2Fb', '%2E%2E', '%73hared')
    """
    name = quote(subject, safe="@")
    if not name.strip("."):
        name = name.replace(".", "%2E")
    if name == SHARED:
        name = f"%{ord(name[0]):02X}{name[1:]}"
    if len(name) > LONGEST:
        name = f"%sha256-{hashlib.sha256(subject.encode()).hexdigest()}"
    return name
