"""Which code assembles and rebuilds a batch of a recorded assembler version."""

from __future__ import annotations

from types import ModuleType

from odradek.streams.assembly.v1 import batch as v1
from odradek.streams.errors import Terminal

CURRENT = 1
_BY_VERSION: dict[int, ModuleType] = {1: v1}


def assembler(version: int) -> ModuleType:
    """The module with `build`, `materialise` and `verify` of that version; raises Terminal if this build lacks it."""
    if version not in _BY_VERSION:
        known = ", ".join(map(str, _BY_VERSION))
        raise Terminal(f"assembler version {version} is not in this build (it has {known}): use one that has it")
    return _BY_VERSION[version]
