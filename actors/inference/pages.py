"""The paged key/value memory: which page belongs to whom, and what can be used again.

Pages hold 64 tokens, the attention kernel's key tile. Life of a page:

    free -> active (held by running requests) -> cached (full, found again by content) -> free
                                              -> parked (kept whole for the next turn of its session) -> cached | free

Promises:
- Content keys are a hash chain over (weight version, every token from position 0), so a page is only ever reused for
  the same prefix under the same weights.
- A full page is never written again while anything can still reach it; two requests share full pages only.
- Cached and parked pages are reclaimed before any request is refused a page: cached ones first, oldest use first, the
  end of a prefix before its beginning; then the session parked longest ago.
- Page 0 belongs to nobody: it fills unused places of block tables.
Called by the scheduler only, from one thread; it holds no tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Final

from odradek.actors.inference.errors import InvalidRequestError

PAGE_SIZE: Final = 64
"""Tokens a page; equal to `odradek.actors.policy.kv.PAGE_SIZE` (a test compares them)."""

KEY_BYTES: Final = 16
"""Bytes of a content key. Two prefixes meet with probability about pages^2 / 2^129; fewer bytes would make that
visible, more only cost memory."""

Spans = list[tuple[int, int]]


def page_key(parent: bytes, version: int, tokens: SequenceOf[int]) -> bytes:
    """Key of a full page after the pages that `parent` (empty: none) stands for."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES, salt=version.to_bytes(16, "little", signed=True))
    digest.update(array("q", tokens).tobytes())
    return digest.digest()


@dataclass(slots=True)
class Holding:
    """Pages of one context: `pages[i]` holds positions 64*i to 64*i+63, computed for the first `computed` tokens.

    The first `len(keys)` pages are full and immutable; the one after may be partly written and is never shared.
    """

    pages: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    computed: int = 0
    kv_spans: Spans = field(default_factory=list)
    """(first position, weight version) of the keys and values; one entry unless KV outlived a reload."""


@dataclass(slots=True)
class _Parked:
    holding: Holding
    tokens: list[int]


class PagePool:
    """Allocator, prefix cache and parked sessions over `num_pages` pages (page 0 unused)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InvalidRequestError(f"a pool needs at least 2 pages (one is reserved), found {num_pages}")
        self.total = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))
        self._active = [0] * num_pages
        self._parked_refs = [0] * num_pages
        self._in_use = 0
        self._key_of: dict[int, tuple[bytes, int]] = {}
        self._by_key: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._parked: OrderedDict[str, _Parked] = OrderedDict()
        self._poisoned: set[int] = set()
        self.to_clear: list[int] = []
        """Pages handed out whose old content is not finite: the owner of the tensors zeroes them before use, because
        an unused slot weighs 0 and 0 * NaN is NaN."""

    @property
    def in_use(self) -> int:
        """Pages held by running requests."""
        return self._in_use

    @property
    def available(self) -> int:
        """Pages that can be had: free, cached or parked."""
        return self.total - self._in_use

    @property
    def parked_sessions(self) -> int:
        return len(self._parked)

    def acquire(self, session_id: str, version: int, tokens: list[int], keep_old: bool = False) -> Holding:
        """Take everything reusable of `tokens` for a request that will compute the rest.

        At least the last token is left to compute (its hidden state is needed). The session's own parked pages come
        first, the partial last page included; else the longest chain of cached full pages. With `keep_old`, parked
        pages of older weights are taken too and `kv_spans` says so.
        """
        parked = self._parked.pop(session_id, None)
        if parked is not None:
            holding = self._resume(parked, version, tokens, keep_old)
            if holding.computed:
                return holding
        return self._match(version, tokens)

    def _resume(self, parked: _Parked, version: int, tokens: list[int], keep_old: bool) -> Holding:
        held = parked.holding
        for page in held.pages:
            self._activate(page)
            self._parked_refs[page] -= 1
        usable = keep_old or held.kv_spans == [(0, version)]
        computed = min(_common_prefix(parked.tokens, tokens), held.computed, len(tokens) - 1) if usable else 0
        if computed // PAGE_SIZE < len(held.keys):
            computed -= computed % PAGE_SIZE  # inside an immutable page: start again at its border
        held.computed = computed
        self.truncate(held)
        if computed:
            held.kv_spans = [s for s in held.kv_spans if s[0] < computed]
        return held

    def truncate(self, held: Holding) -> None:
        """Give back the pages that lie wholly behind `held.computed`."""
        needed = -(-held.computed // PAGE_SIZE)
        self._drop(held.pages[needed:])
        del held.pages[needed:]
        del held.keys[held.computed // PAGE_SIZE :]

    def _match(self, version: int, tokens: list[int]) -> Holding:
        held = Holding(kv_spans=[(0, version)])
        key = b""
        for i in range((len(tokens) - 1) // PAGE_SIZE):
            key = page_key(key, version, tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE])
            page = self._by_key.get(key)
            if page is None:
                break
            self._activate(page)
            held.pages.append(page)
            held.keys.append(key)
        held.computed = len(held.pages) * PAGE_SIZE
        return held

    def grow(self, held: Holding, tokens: int) -> bool:
        """Make room for the first `tokens` tokens; False (and nothing changed) if the pool can't give that many."""
        missing = -(-tokens // PAGE_SIZE) - len(held.pages)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        held.pages.extend(self._allocate() for _ in range(missing))
        return True

    def seal(self, held: Holding, version: int, tokens: list[int]) -> None:
        """Register the pages that became full, so that later requests find them. Not for mixed KV."""
        for i in range(len(held.keys), held.computed // PAGE_SIZE):
            parent = held.keys[-1] if held.keys else b""
            key = page_key(parent, version, tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE])
            held.keys.append(key)
            if key not in self._by_key:
                self._by_key[key] = held.pages[i]
                self._key_of[held.pages[i]] = (key, version)

    def park(self, session_id: str, held: Holding, tokens: list[int]) -> None:
        """A request gives its pages back; they stay together for the session's next turn until others need them."""
        self.forget(session_id)
        needed = -(-held.computed // PAGE_SIZE)
        self._drop(held.pages[needed:])
        del held.pages[needed:]
        if not held.pages:
            return
        for page in held.pages:
            self._parked_refs[page] += 1
            self._active[page] -= 1
            if not self._active[page]:
                self._in_use -= 1
        self._parked[session_id] = _Parked(held, tokens[: held.computed])

    def release(self, held: Holding) -> None:
        """A request gives its pages back and leaves nothing parked; full pages stay findable until others need them."""
        self._drop(held.pages)
        held.pages, held.keys, held.computed = [], [], 0

    def poison(self, held: Holding) -> None:
        """A request gives back pages that may hold NaN: nobody finds them again, and they are cleared before reuse."""
        for page in held.pages:
            self._poisoned.add(page)
            if page in self._key_of:
                self._unregister(page, self._key_of[page][0])
        self.release(held)

    def forget(self, session_id: str) -> None:
        """The session will not come back: its parked pages become ordinary cached or free pages."""
        parked = self._parked.pop(session_id, None)
        if parked is not None:
            self._unpark(parked)

    def drop_version(self, version: int, parked: bool = True) -> None:
        """Make pages of these weights unfindable (the version is no longer served), parked ones too unless kept."""
        for page, (key, of) in list(self._key_of.items()):
            if of == version:
                self._unregister(page, key)
        if parked:
            for session_id in [s for s, p in self._parked.items() if any(v == version for _, v in p.holding.kv_spans)]:
                self.forget(session_id)

    def _unregister(self, page: int, key: bytes) -> None:
        del self._key_of[page]
        del self._by_key[key]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def _activate(self, page: int) -> None:
        if not self._active[page]:
            self._in_use += 1
            self._cached.pop(page, None)
        self._active[page] += 1

    def _drop(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._active[page] -= 1
            if not self._active[page]:
                self._in_use -= 1
                self._retire(page)

    def _unpark(self, parked: _Parked) -> None:
        for page in reversed(parked.holding.pages):
            self._parked_refs[page] -= 1
            self._retire(page)

    def _retire(self, page: int) -> None:
        if self._active[page] or self._parked_refs[page]:
            return
        if page in self._key_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _allocate(self) -> int:
        while not self._free:
            if self._cached:
                page = next(iter(self._cached))
                self._unregister(page, self._key_of[page][0])
            else:
                session_id = next(iter(self._parked))
                self.forget(session_id)
        page = self._free.pop()
        if page in self._poisoned:
            self._poisoned.discard(page)
            self.to_clear.append(page)
        self._activate(page)
        return page


def _common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
