"""Model-based test of the page pool: a perfect account of who may read what, against random use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from odradek.actors.inference.errors import InvalidRequestError
from odradek.actors.inference.pages import PAGE_SIZE, Holding, PagePool, page_key
from odradek.actors.policy import kv

PAGES = 12


def test_pages_are_the_models_pages() -> None:
    """The attention's 64-key tiles are the pages; a different size would change the numbers."""
    assert PAGE_SIZE == kv.PAGE_SIZE


def test_a_pool_without_a_usable_page_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least 2 pages"):
        PagePool(1)


def test_a_key_covers_version_and_every_token_before() -> None:
    page = list(range(64))
    keys = {
        page_key(b"", 1, page),
        page_key(b"", 2, page),
        page_key(b"x", 1, page),
        page_key(b"", 1, [*page[:-1], 99]),
    }
    assert len(keys) == 4


class Use:
    """One running request as the test sees it."""

    def __init__(self, session: str, version: int, tokens: list[int], held: Holding) -> None:
        self.session, self.version, self.tokens, self.held = session, version, tokens, held


class PoolMachine(RuleBasedStateMachine):
    """`content[page][slot]` is what a correct engine has written there: (version, the tokens up to that position)."""

    uses = Bundle("uses")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES + 1)
        self.content: dict[int, dict[int, tuple[int, tuple[int, ...]]]] = {p: {} for p in range(1, PAGES + 1)}
        self.live: list[Use] = []

    def write(self, use: Use, upto: int) -> None:
        for position in range(use.held.computed, upto):
            page = use.held.pages[position // PAGE_SIZE]
            new = (use.version, tuple(use.tokens[: position + 1]))
            for other in self.live:
                if other is not use and page in other.held.pages[: -(-other.held.computed // PAGE_SIZE)]:
                    old = self.content[page].get(position % PAGE_SIZE)
                    assert old == new, "a page that another request reads was changed"
            self.content[page][position % PAGE_SIZE] = new
        use.held.computed = upto

    @rule(
        target=uses,
        session=st.sampled_from(["a", "b", "c"]),
        version=st.integers(1, 2),
        # Few tokens and few lengths, so that prefixes meet.
        tail=st.lists(st.integers(0, 1), max_size=2),
        length=st.sampled_from([1, 63, 64, 126, 127, 128, 150, 300]),
        steps=st.integers(1, 3),
    )
    def start(self, session: str, version: int, tail: list[int], length: int, steps: int) -> Use | None:
        tokens = [*([7] * length), *tail]
        held = self.pool.acquire(session, version, tokens)
        use = Use(session, version, tokens, held)
        assert held.computed < len(tokens), "nothing is left to compute"
        for position in range(held.computed):
            page = held.pages[position // PAGE_SIZE]
            found = self.content[page].get(position % PAGE_SIZE)
            assert found == (version, tuple(tokens[: position + 1])), "reused what is not this prefix and version"
        if not self.pool.grow(held, len(tokens)):
            self.pool.release(held)
            return None
        self.live.append(use)
        missing = len(tokens) - held.computed
        for i in range(1, steps + 1):
            self.write(use, len(tokens) - missing + missing * i // steps)
            self.pool.seal(held, version, tokens)
        return use

    @rule(use=uses, more=st.lists(st.integers(0, 1), min_size=1, max_size=70))
    def go_on(self, use: Use | None, more: list[int]) -> None:
        if use in self.live and use is not None and self.pool.grow(use.held, len(use.tokens) + len(more)):
            use.tokens += more
            self.write(use, len(use.tokens))
            self.pool.seal(use.held, use.version, use.tokens)

    @rule(use=consumes(uses), how=st.sampled_from(["park", "release", "poison"]))
    def end(self, use: Use | None, how: str) -> None:
        if use not in self.live or use is None:
            return
        self.live.remove(use)
        if how == "park":
            self.pool.park(use.session, use.held, use.tokens)
        elif how == "release":
            self.pool.release(use.held)
        else:
            self.pool.poison(use.held)

    @rule(session=st.sampled_from(["a", "b", "c"]))
    def forget(self, session: str) -> None:
        self.pool.forget(session)

    @rule(version=st.integers(1, 2))
    def drop_version(self, version: int) -> None:
        self.pool.drop_version(version)
        assert self.pool.acquire("nobody", version, [7] * 200).computed == 0

    @invariant()
    def each_page_is_counted_once(self) -> None:
        held = {page for use in self.live for page in use.held.pages}
        assert 0 not in held
        assert self.pool.in_use == len(held)
        assert self.pool.available == PAGES - len(held)

    def teardown(self) -> None:
        """Nothing leaks: with every request gone, all pages can be had at once."""
        for use in self.live:
            self.pool.release(use.held)
        everything = Holding()
        assert self.pool.grow(everything, PAGES * PAGE_SIZE)
        assert sorted(everything.pages) == list(range(1, PAGES + 1))


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
