"""Production first, wherever the work of one process waits for something bounded.

Rollouts fill whatever they are given; a person who waits behind all of them is starved. So each bounded thing that both
share is there twice: once for rollouts, once for production alone. `serving` marks what is done for a person, in the
task that enters it and in every task that this one starts; what is kept here looks at the mark when it is asked.

Guarantee (Production first in tests/GUARANTEES.md): work of production begins whatever rollouts hold or wait for, in
threads, in readers of the log, and in everything else that is `Apart`: test_production_first.py and
test_production_log.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_production: ContextVar[bool] = ContextVar("production", default=False)


@contextmanager
def serving(production: bool) -> Iterator[None]:
    """What is done in here is done for a person, or is not."""
    token = _production.set(production)
    try:
        yield
    finally:
        _production.reset(token)


class Apart(Generic[T]):
    """Two of a kind: one that rollouts share, one that is production's alone."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._of_rollouts, self._of_production = make(), make()

    def mine(self) -> T:
        """The one for what is being done now."""
        return self._of_production if _production.get() else self._of_rollouts


class ReservedThreads(ThreadPoolExecutor):
    """A pool of threads with as many again for production. Threads are started when they are first needed."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", **options: Any) -> None:
        super().__init__(max_workers, thread_name_prefix, **options)
        self._production = ThreadPoolExecutor(max_workers, f"{thread_name_prefix}-production", **options)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """To the threads of whoever asks."""
        if _production.get():
            return self._production.submit(fn, *args, **kwargs)
        return super().submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Both pools."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._production.shutdown(wait, cancel_futures=cancel_futures)
